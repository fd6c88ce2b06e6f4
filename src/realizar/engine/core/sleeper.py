"""`Sleeper` has a backend give its device's memory back, and take it again."""

from __future__ import annotations

from realizar.backends.base import Backend, Sleeps, Transfer
from realizar.errors import EngineUnavailableError, UnsupportedModelError
from realizar.kv_cache.manager import KVCacheManager


class Sleeper:
    """Knows whether a backend is asleep."""

    def __init__(self, backend: Backend, cache: KVCacheManager) -> None:
        self._backend, self._cache = backend, cache
        self._is_asleep = False

    def check_awake(self) -> None:
        """Refuse what needs the device.

        Raises:
            EngineUnavailableError: the model is asleep.
        """
        if self._is_asleep:
            raise EngineUnavailableError("the model is asleep: its weights are in the host's memory", 1.0)

    def sleep(self, *, has_work: bool) -> Transfer:
        """Give the device's memory back; the cache forgets what it holds.

        Raises:
            UnsupportedModelError: the model can't sleep. EngineUnavailableError: a request is open, or it is asleep.
            CapacityError, KernelError: the host's memory does not suffice. The model is awake as before.
        """
        self.check_awake()
        backend = self._sleeping()
        if has_work:
            raise EngineUnavailableError("the model can't sleep while a request is open", 1.0)
        self._cache.forget()
        done = backend.sleep()
        self._is_asleep = True
        return done

    def wake(self) -> Transfer:
        """Take the device's memory again.

        Raises:
            UnsupportedModelError: the model can't sleep. EngineUnavailableError: it is not asleep.
            CapacityError, KernelError: the device's memory does not suffice. The model is asleep as before.
        """
        backend = self._sleeping()
        if not self._is_asleep:
            raise EngineUnavailableError("the model is not asleep", 1.0)
        done = backend.wake()
        self._is_asleep = False
        return done

    def _sleeping(self) -> Sleeps:
        if not isinstance(self._backend, Sleeps):
            raise UnsupportedModelError("a model on the CPU can't sleep: its weights are in the host's memory already")
        return self._backend
