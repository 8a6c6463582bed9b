"""What `await` runs of streams, events and downloads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Optional


def wait(
    begin: Callable[[Callable[[Optional[BaseException]], None]], None],
    result: Callable[[], Any] | None = None,
) -> Generator[Any, None, Any]:
    """Waits for what calls back once, in the event loop that runs.

    `begin` takes the function to call, on any thread, with `None` or an exception. `result` gives
    what the wait returns. Nothing polls. A wait that is cancelled ends nothing.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if future.done():
            return
        try:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(None if result is None else result())
        except BaseException as failure:
            future.set_exception(failure)

    def done(error: BaseException | None) -> None:
        try:
            loop.call_soon_threadsafe(settle, error)
        except RuntimeError:
            # The loop was closed: nobody waits any more.
            pass

    begin(done)
    return future.__await__()
