"""Names of models, as Ollama's clients write them: a name without a tag means the tag `latest`."""

from __future__ import annotations

from starlette.requests import Request

from realizar.server.api import Api
from realizar.server.errors import ApiError, refused
from realizar.server.http.request import settings_of
from realizar.server.models.models import Models, ModelStatus, model_of, models_of
from realizar.server.models.needs import Need, nothing
from realizar.server.ollama.times import Clock, read_keep_alive

_LATEST = ":latest"
_HOSTS = ("https://", "hf.co/", "huggingface.co/")
_SHOWN_MODELS = 8


def shown_name(name: str) -> str:
    """A served name with its tag. Clients look names up in the list of models, and add the tag before they do."""
    return name if ":" in name.rpartition("/")[2] else name + _LATEST


def network_part(name: str) -> str:
    """A name without the host of Hugging Face and the tag `latest`, which Ollama's clients write."""
    for host in _HOSTS:
        name = name.removeprefix(host)
    return name.removesuffix(_LATEST) if "/" in name else name


def find_model(models: Models, name: str) -> tuple[str, ModelStatus]:
    """The served name that a request means, and its model. Raises ApiError: 400 without a name, 404 if not served."""
    if not name:
        raise refused("model must be the name of a model", "model", "invalid_value")
    listed = models.listed()
    served = [(known, status) for status in listed for known in status.names]
    wanted = (name, shown_name(name), shown_name(network_part(name)))
    exact = [each for each in served if each[0] == name]
    for each in exact or [each for each in served if shown_name(each[0]) in wanted]:
        return each
    there = ", ".join(ascii(shown_name(status.names[0])) for status in listed[:_SHOWN_MODELS])
    message = f"model {name[:200]!a} not found: this server has {there}"
    raise ApiError(404, message, param="model", code="model_not_found")


async def model_for(
    request: Request, name: str, keep_alive: float | str | None, clock: Clock, need: Need = nothing
) -> Api:
    """What a request works with to use the model of a name; the model is there until the request has ended.

    Args:
        keep_alive: as in the request; without effect where the operator alone says how long models stay loaded.
        clock: notes the wait for the model.

    Raises:
        ApiError: as of `find_model`, `read_keep_alive` and `model_of`.
    """
    keep_alive_s = read_keep_alive(keep_alive)
    if not settings_of(request).allow_request_keep_alive:
        keep_alive_s = None
    clock.asks()
    api = await model_of(request, find_model(models_of(request), name)[0], keep_alive_s, need)
    clock.loaded()
    return api


async def unloads(request: Request, name: str, keep_alive: float | str | None) -> bool:
    """Load the model of a request that asks for nothing else, or unload it where the request says so.

    Returns True if the model is unloaded, which is done when the request has ended. Raises ApiError: 403; requests may
    not unload models. ApiError, EngineUnavailableError: as of `model_for`; no engine is ready.
    """
    models = models_of(request)
    found, status = find_model(models, name)
    unload = models.several and read_keep_alive(keep_alive) == 0
    if unload and not settings_of(request).allow_request_keep_alive:
        raise ApiError(
            403,
            "models of this server are unloaded by whoever runs it: it was started without --allow-request-keep-alive",
            param="keep_alive",
            code="keep_alive_not_allowed",
        )
    if not unload or status.state in ("ready", "loading"):
        api = await model_for(request, found, keep_alive, Clock())
        _ = api.engine.info  # raises while a server's only model is being loaded
    elif status.state in ("finishing", "asleep"):
        models.end_sleep(found)
    return unload
