"""Objects that have to be there, and whole: not found is believed only where the store does not list them either, and
damaged only where it is found again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from mgpu_train.store.base import Damaged, NotFound, Store, Unavailable

T = TypeVar("T")

_ASK_S = 60.0
_PAUSE_S = 2.0


def surely(store: Store, key: str, ask: Callable[[], T], sleep: Callable[[float], object] = time.sleep) -> T:
    """What `ask` returns. Where it finds no object under a key that the store lists, it asks again, for a minute.

    S3 may say NoSuchKey of an object that it has for up to 15 minutes after a bucket's versioning was first enabled
    (https://docs.aws.amazon.com/AmazonS3/latest/userguide/manage-versioning-examples.html).

    Raises:
        NotFound: the store does not list it either.
        Unavailable: it lists the object, and does not give it.
    """
    for left in range(int(_ASK_S / _PAUSE_S), -1, -1):
        try:
            return ask()
        except NotFound:
            if not any(stat.key == key for stat in store.list(key)):
                raise
            if left:
                sleep(_PAUSE_S)
    raise Unavailable(f"{store.url} lists {key}, and says that there is no such object. Try again later.")


def twice(store: Store, key: str, ask: Callable[[], T]) -> T:
    """What `ask` returns, which reads the object `key`. What is damaged is read once more, from the store itself: the
    memory, a cache or the network of this machine may be at fault.

    Raises:
        Damaged: it is so again; what `ask` raises besides.
    """
    try:
        return ask()
    except Damaged:
        store.forget(key)
        return ask()
