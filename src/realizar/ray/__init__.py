"""Serving on many hosts with Ray Serve. Ray is imported below this folder alone; the extra `ray` installs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from realizar.errors import RealizarError
from realizar.extras import how_to_install
from realizar.ray.options import RayOptions

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["RayOptions", "application", "build_app"]


def build_app(model: str, options: RayOptions | None = None) -> Application:
    """Build the application of one model for `ray.serve.run`. The model's files are found and its memory is planned.

    `model` is a path that every host has, a pulled name or a Hugging Face name. It raises RealizarError if Ray Serve is
    not installed, or the model can't be found or does not fit.
    """
    require_ray()
    from realizar.ray.deployments import make_application, plan_model

    options = options or RayOptions()
    return make_application(plan_model(model, options), options)


def application(arguments: dict[str, Any]) -> Application:
    """Build the application from the `args` of Ray Serve's configuration file: `model`, and fields of `RayOptions`.

    Errors are those of `build_app`; so is that of an argument that is unknown or of another type.
    """
    options = dict(arguments)
    model = options.pop("model", None)
    if not isinstance(model, str) or not model:
        raise RealizarError("args needs a model: a path, a pulled name or a Hugging Face name")
    return build_app(model, RayOptions.read(options))


def require_ray() -> None:
    """It raises RealizarError if Ray Serve is not installed; the message says how to install it."""
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise RealizarError(f"Ray Serve is not installed ({error}): {how_to_install('ray')}") from error
