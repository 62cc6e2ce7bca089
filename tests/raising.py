"""What a call raises: its type, and words of its message."""

import pytest
from oracle import seen_type


def check_raises(error, words: str | None, function, /, *arguments, **keywords) -> pytest.ExceptionInfo:
    """`error`: the type itself; in a tuple also one that derives from it. `words`: a pattern; None if they are another's."""
    with pytest.raises(error, match=words) as caught:
        function(*arguments, **keywords)
    assert isinstance(error, tuple) or error in (type(caught.value), seen_type(caught.value)), caught.type
    return caught
