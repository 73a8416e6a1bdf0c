# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""What every vLLM deployment needs, whatever the model: how the ranks find each other and who serves the API.

A profile holds what belongs to its model. It never names ranks, addresses or ports.
"""

from __future__ import annotations

import dataclasses
import typing as t

# The exact form: NCCL takes a bare name as the beginning of any interface's or device's name. Gloo knows whole names only.
_NCCL_EXACT = "="
# Without a device of ours, NCCL would take any that it finds, say the one with a PC behind it, or fail where a profile asks for IB.
_NCCL_SOCKETS = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}

API_KEY_VARIABLE = "VLLM_API_KEY"

# Set per rank from one fact, or by the entry script; a user's value would differ from what the other ranks use.
RESERVED_ENVIRONMENT = {
    "VLLM_HOST_IP": "fabric_address",
    "NCCL_SOCKET_IFNAME": "fabric_interface",
    "GLOO_SOCKET_IFNAME": "fabric_interface",
    "NCCL_IB_HCA": "fabric_hcas",
    "NCCL_IB_GID_INDEX": "fabric_gid_policy",
    API_KEY_VARIABLE: "serve_api_key",
    "HF_TOKEN": "weights_hub_token",
    "HUGGING_FACE_HUB_TOKEN": "weights_hub_token",
}

RESERVED_ARGUMENTS = {
    "--served-model-name": "serve_served_model_name",
    "--tensor-parallel-size": "serve_tensor_parallel",
    "-tp": "serve_tensor_parallel",
    "--pipeline-parallel-size": "serve_pipeline_parallel",
    "-pp": "serve_pipeline_parallel",
    "--nnodes": "serve_nodes",
    "--node-rank": "serve_nodes",
    "--headless": "serve_nodes",
    "--master-addr": "fabric_address",
    "--master-port": "serve_rendezvous_port",
    "--host": "serve_bind",
    "--port": "serve_port",
    "--api-key": "serve_api_key",
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one rank stands in its group."""

    rank: int
    ranks: int
    head_address: str
    address: str
    interface: str | None
    hcas: tuple[str, ...]


def head_of_command(model: str, settings: t.Mapping[str, t.Any], place: Place) -> list[str]:
    """The command up to the profile's own arguments."""
    command = ["vllm", "serve", model, "--served-model-name", settings["serve_served_model_name"]]
    command += ["--tensor-parallel-size", str(settings["serve_tensor_parallel"])]
    if settings["serve_pipeline_parallel"] > 1:
        command += ["--pipeline-parallel-size", str(settings["serve_pipeline_parallel"])]
    if place.ranks > 1:
        command += ["--nnodes", str(place.ranks), "--node-rank", str(place.rank)]
        command += ["--master-addr", place.head_address, "--master-port", str(settings["serve_rendezvous_port"])]
        command += ["--distributed-executor-backend", "mp"]
    if place.rank == 0:
        command += ["--host", settings["serve_bind"], "--port", str(settings["serve_port"])]
    else:
        command += ["--headless"]
    return command


def rank_environment(place: Place) -> dict[str, str]:
    """The variables that differ between ranks. What is not known is absent: NCCL reads an empty number as 0."""
    if place.ranks == 1:
        return {}
    variables = {"VLLM_HOST_IP": place.address}
    if place.interface:
        variables["NCCL_SOCKET_IFNAME"] = _NCCL_EXACT + place.interface
        variables["GLOO_SOCKET_IFNAME"] = place.interface
        variables.update({"NCCL_IB_HCA": _NCCL_EXACT + ",".join(place.hcas)} if place.hcas else _NCCL_SOCKETS)
    return variables
