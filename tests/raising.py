"""What a call raises: its type, and words of its message."""

import pytest


def check_raises(error, words: str | None, function, /, *arguments, **keywords) -> pytest.ExceptionInfo:
    """`words`: a pattern that the message has; None if it is somebody else's."""
    with pytest.raises(error, match=words) as caught:
        function(*arguments, **keywords)
    return caught
