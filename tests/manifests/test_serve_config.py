"""What Ray Serve is told: its own schema, our configuration, and the deployments that there are."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from ray.serve._private.build_app import build_app
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from cluster.app import app
from protocol.config import parse_configuration
from protocol.errors import ConfigError
from tests.manifests.documents import MANIFESTS, documents, of_kind

CONFIGS: dict[str, dict[str, Any]] = {
    "serve.yaml": documents(MANIFESTS / "serve.yaml")[0],
    **{
        service["metadata"]["name"]: yaml.safe_load(service["spec"]["serveConfigV2"])
        for service in of_kind("RayService")
    },
}
each = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def application_of(config: dict[str, Any]) -> ServeApplicationSchema:
    (application,) = ServeDeploySchema.model_validate(config).applications
    return application


@each
def test_it_fits_serve_s_schema_and_ours(config: dict[str, Any]) -> None:
    application = application_of(config)
    assert application.import_path == "cluster.app:app"
    assert parse_configuration(application.args).cluster.num_workers >= 1
    assert config["http_options"] == {"host": "0.0.0.0", "port": 8000}


def unknown_to_serve(config: dict[str, Any]) -> list[str]:
    """Fields that Serve would drop without a word: its models take any."""
    unknown = [key for key in config if key not in ServeDeploySchema.model_fields]
    for application in config["applications"]:
        unknown += [key for key in application if key not in ServeApplicationSchema.model_fields]
        for deployment in application.get("deployments", []):
            unknown += [key for key in deployment if key not in DeploymentSchema.model_fields]
            options = deployment["ray_actor_options"]
            unknown += [key for key in options if key not in RayActorOptionsSchema.model_fields]
    options = config["http_options"]
    return unknown + [key for key in options if key not in HTTPOptionsSchema.model_fields]


@each
def test_nothing_in_it_is_misspelt(config: dict[str, Any]) -> None:
    assert unknown_to_serve(config) == []
    assert unknown_to_serve(config | {"proxy_locaton": "EveryNode"}) == ["proxy_locaton"]
    with pytest.raises(ConfigError, match="num_wrkers"):
        parse_configuration(application_of(config).args | {"cluster": {"num_wrkers": 2}})


@each
def test_deployments_that_it_names_exist_and_stay_off_the_head(config: dict[str, Any]) -> None:
    application = application_of(config)
    built = build_app(app(application.args), name=application.name)
    there = {deployment.name for deployment in built.deployments}
    told = {item.name: item for item in application.deployments}
    if config is CONFIGS["serve.yaml"]:
        assert told == {}
        return
    assert set(told) == there == {"engine", "ingress"}
    for item in told.values():
        options = item.ray_actor_options
        assert options is not None
        assert not isinstance(options, str)
        assert options.num_cpus == 1
