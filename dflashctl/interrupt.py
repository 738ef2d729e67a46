"""Ctrl-C ends a command within a second, whatever it waits for.

KeyboardInterrupt reaches the main thread first and says what goes on. But a thread pool that joins its workers, a name
server that does not answer, an import or the interpreter's own end can keep that from becoming an exit. So a thread is
told of the signal by the C handler itself (the wakeup descriptor), and ends the process where the main thread has not.
Nothing is lost by that: a run lives elsewhere, and what a command writes is safe to be cut anywhere.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time

GRACE_S = 0.4  # for the main thread's own words
CODE = 130
WORDS = "interrupted; a run that has started goes on, see `dflashctl status -w`"  # nothing failed: it was asked for


def guard() -> None:
    """Watch over SIGINT from now on; call it once, in the main thread."""
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(told,), daemon=True).start()


def _watch(told: int) -> None:
    while signal.SIGINT not in os.read(told, 64):
        pass
    time.sleep(GRACE_S)
    with contextlib.suppress(OSError):
        os.write(2, WORDS.encode() + b"\n")
    os._exit(CODE)


def leave(code: int) -> int:
    """`code`, for the interpreter to end with; after Ctrl-C the process ends here, and waits for no thread."""
    if code == CODE:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)
    return code
