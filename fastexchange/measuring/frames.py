"""Tracebacks of a measured call's exceptions, without this package's frames."""

import types

__all__ = ["without_own_frames"]

_PACKAGE = __package__.partition(".")[0]


def without_own_frames(error: Exception) -> Exception:
    """Remove this package's frames from the tracebacks of `error` and of its causes. Returns `error`."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        each.__traceback__ = _without_own(each.__traceback__)
        each = each.__cause__ or each.__context__
    return error


def _without_own(traceback: types.TracebackType | None) -> types.TracebackType | None:
    kept = []
    while traceback is not None:
        if not _is_own(traceback.tb_frame):
            kept.append(traceback)
        traceback = traceback.tb_next
    made: types.TracebackType | None = None
    for entry in reversed(kept):
        made = types.TracebackType(made, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return made


def _is_own(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__package__") or "").partition(".")[0] == _PACKAGE
