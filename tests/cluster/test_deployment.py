"""How many replicas the application asks Ray Serve for."""

from __future__ import annotations

from ray.serve.config import AutoscalingConfig

from cluster.autoscaling import EnginePolicy
from cluster.deployment import engine_replicas, ingress_replicas
from protocol.config import AutoscalingSettings


def test_without_autoscaling_their_number_is_fixed() -> None:
    settings = AutoscalingSettings(min_engines=3, min_ingresses=2)
    assert engine_replicas(settings) == {"num_replicas": 3}
    assert ingress_replicas(settings) == {"num_replicas": 2}


def test_every_setting_of_autoscaling_reaches_serve() -> None:
    settings = AutoscalingSettings(
        enabled=True,
        min_engines=2,
        max_engines=5,
        target_debt=7.0,
        slack=0.1,
        up_delay=3.0,
        down_delay=90.0,
        report_interval=1.5,
        stale_after=11.0,
        min_ingresses=3,
        max_ingresses=6,
        target_requests=40,
    )
    engines = engine_replicas(settings)["autoscaling_config"]
    assert isinstance(engines, AutoscalingConfig)
    assert (engines.min_replicas, engines.max_replicas) == (2, 5)
    # The policy waits by itself; Serve adds nothing.
    assert (engines.upscale_delay_s, engines.downscale_delay_s) == (0.0, 0.0)
    assert (engines.metrics_interval_s, engines.look_back_period_s) == (1.5, 4.5)
    assert engines.policy.policy_function == "cluster.autoscaling:EnginePolicy"
    rules = {"target_debt": 7.0, "slack": 0.1, "up_delay": 3.0, "down_delay": 90.0}
    assert engines.policy.policy_kwargs == rules | {"stale_after": 11.0}
    assert EnginePolicy(**engines.policy.policy_kwargs)
    ingresses = ingress_replicas(settings)["autoscaling_config"]
    assert (ingresses.min_replicas, ingresses.max_replicas) == (3, 6)
    assert ingresses.target_ongoing_requests == 40.0
    assert (ingresses.upscale_delay_s, ingresses.downscale_delay_s) == (3.0, 90.0)
