"""What a call raises: its type, and words of its message."""

import pytest
from oracle import seen_type


def check_raises(error, words: str | None, function, /, *arguments, **keywords) -> BaseException:
    """`error`: the type itself; in a tuple also one that derives from it. `words`: a pattern; None if they are another's."""
    with pytest.raises(error, match=words) as caught:
        function(*arguments, **keywords)
    try:
        assert isinstance(error, tuple) or error in (caught.type, seen_type(caught.value)), caught.type
        return caught.value
    finally:
        del caught  # this frame is in its traceback, and behind it the caller's
