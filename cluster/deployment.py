"""The Ray Serve deployments: a stateless ingress and the engines behind it."""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from starlette.routing import Route

from cluster.engine_client import EngineClient
from cluster.engine_directory import RayDirectory
from cluster.engine_replica import Engine
from cluster.http_api import build_app
from cluster.request_metrics import CountResponses, RequestMetrics
from cluster.tokenizer import load_tokenizer
from protocol.config import Configuration
from protocol.errors import LoopmeshError
from protocol.sampling import SamplingParams
from worker.models.registry import resolve_model

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle
    from starlette.applications import Starlette

    from cluster.tokenizer import Tokenizer
    from protocol.config import ApiSettings, AutoscalingSettings
    from protocol.profile import ModelProfile
    from scheduler.output import RequestOutput

CANARY_PROMPT = [0]
HEALTH_INTERVAL = 1.0
"""Seconds for which an answer about the engine's health is taken as still true."""


class Ingress:
    """HTTP, tokenization and text; holds no request that an engine does not.

    Owner: Ray Serve. Mutated only by: its methods, on the replica's event loop.
    """

    def __init__(self, engine: DeploymentHandle[Engine], configuration: str) -> None:
        self._configuration = Configuration.model_validate_json(configuration)
        # The handle only makes the engines part of the application: see cluster/engine_replica.py.
        directory = RayDirectory(engine.app_name)
        self._client = EngineClient(directory, self._configuration.api.consumer_lease)
        self._tokenizer = load_tokenizer(resolve_model(self._configuration.worker.model))
        self._model: ModelProfile | None = None
        self._answered = False
        self._checked = (0.0, "not checked yet")
        self._metrics = RequestMetrics(self._configuration.model_name)
        self._client.start()

    async def __serve_build_asgi_app__(self) -> Starlette:
        """The ASGI application, which Serve asks for once the replica is made."""
        # The engine starts at the same time, and may take as long as its workers may.
        cluster = self._configuration.cluster
        self._model = await self._client.model(cluster.place_timeout + cluster.start_timeout)
        app = build_app(self)
        routes = [route.path for route in app.routes if isinstance(route, Route)]
        app.add_middleware(CountResponses, metrics=self._metrics, routes=routes)
        return app

    @property
    def model_name(self) -> str:
        """The name that clients put into `model`."""
        return self._configuration.model_name

    @property
    def limits(self) -> ApiSettings:
        """Limits of the endpoint."""
        return self._configuration.api

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def max_loops(self) -> int:
        """Loops of a full pass of the model."""
        return self._model.max_loops if self._model is not None else 0

    def generate(
        self, prompt: list[int], params: SamplingParams, *, tenant: str = ""
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of one request; see http_api.CompletionService."""
        outputs = self._client.generate(prompt, params, tenant=tenant)
        return self._metrics.observed(outputs, len(prompt), params.n)

    async def finish(self, request_id: str, at_output_index: int, choice: int = 0) -> None:
        """End a request whose text is complete; see http_api.CompletionService."""
        self._metrics.finished(request_id, choice)
        await self._client.finish(request_id, at_output_index, choice)

    async def health(self) -> str | None:
        """None once a real token has come back and while the engine has workers."""
        checked, reason = self._checked
        if time.monotonic() - checked > HEALTH_INTERVAL:
            reason = await self._check()
            self._checked = (time.monotonic(), reason)
        return reason or None

    async def _check(self) -> str:
        """Why a request would not run, or nothing."""
        try:
            if not self._answered:
                await self._ask()
        except (LoopmeshError, TimeoutError) as error:
            return str(error) or "the engine does not answer"
        reason = self._client.trouble()
        self._answered = reason is None
        return reason or ""

    async def _ask(self) -> None:
        """One token, end to end."""
        params = SamplingParams(max_tokens=1, seed=0, ignore_eos=True)
        async with aclosing(self._client.generate(CANARY_PROMPT, params)) as outputs:
            async for output in outputs:
                output.raise_error()

    async def __del__(self) -> None:
        await self._client.close()


def build_application(configuration: Configuration) -> Application:
    """The Serve application: ingress replicas in front of engines, as many as `autoscaling` says.

    Serve's own limits sit above ours, so that a client over quota gets our answer.
    """
    settings = configuration.model_dump_json()
    cluster, requests = configuration.cluster, configuration.api.max_requests
    scaling = configuration.autoscaling
    engine = serve.deployment(
        name="engine",
        max_ongoing_requests=64,  # what Serve and tests ask: no request of a client
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=2.0,
        health_check_timeout_s=15.0,
        # Serve kills what is not gone by then, and workers and places would stay behind.
        graceful_shutdown_timeout_s=cluster.drain_timeout + 3 * cluster.shutdown_timeout,
        graceful_shutdown_wait_loop_s=0.1,
        **engine_replicas(scaling),
    )(Engine)
    ingress = serve.deployment(
        name="ingress",
        max_ongoing_requests=2 * requests + 64,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=cluster.drain_timeout if scaling.enabled else 5.0,
        **ingress_replicas(scaling),
    )(serve.ingress()(Ingress))
    return ingress.bind(engine.bind(settings), settings)


def engine_replicas(scaling: AutoscalingSettings) -> dict[str, Any]:
    """How many engines there are, as options of a deployment."""
    if not scaling.enabled:
        return {"num_replicas": scaling.min_engines}
    rules = {"target_debt", "slack", "up_delay", "down_delay", "stale_after"}
    policy = AutoscalingPolicy(  # type: ignore[no-untyped-call]
        policy_function="cluster.autoscaling:EnginePolicy",
        policy_kwargs=scaling.model_dump(include=rules),
    )
    # The policy has delays of its own, which know what it knows.
    delays = {"upscale_delay_s": 0.0, "downscale_delay_s": 0.0}
    bounds = {"min_replicas": scaling.min_engines, "max_replicas": scaling.max_engines}
    return {"autoscaling_config": _autoscaling(scaling, policy=policy, **bounds, **delays)}


def ingress_replicas(scaling: AutoscalingSettings) -> dict[str, Any]:
    """How many ingress replicas there are, as options of a deployment."""
    if not scaling.enabled:
        return {"num_replicas": scaling.min_ingresses}
    return {
        "autoscaling_config": _autoscaling(
            scaling,
            min_replicas=scaling.min_ingresses,
            max_replicas=scaling.max_ingresses,
            target_ongoing_requests=float(scaling.target_requests),
            upscale_delay_s=scaling.up_delay,
            downscale_delay_s=scaling.down_delay,
        )
    }


def _autoscaling(scaling: AutoscalingSettings, **options: Any) -> AutoscalingConfig:  # noqa: ANN401
    # Serve calls the interval deprecated, for a variable that Serve 2.60 does not read yet.
    return AutoscalingConfig(
        metrics_interval_s=scaling.report_interval,
        look_back_period_s=3 * scaling.report_interval,
        **options,
    )
