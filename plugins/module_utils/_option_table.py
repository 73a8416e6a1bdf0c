# Copyright: (c) 2026, The sparkops.inference authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This code is private to the collection: it may change at any time.

"""The options that every profile has. Documents, surveys, argument specs and tests are made from this table.

Fields are those of ``_options.Option``. A profile may give another default or a narrower range, and adds its own.
"""

from __future__ import annotations

import typing as t

_HOST_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_DEPLOYMENT = r"[a-z0-9][a-z0-9_-]{0,47}"
_DIGEST = r"sha256:[0-9a-f]{64}"

_GROUP: dict[str, dict[str, t.Any]] = {
    "serve_nodes": {
        "kind": "list",
        "pattern": _HOST_NAME,
        "form": "a list of inventory host names, the head first",
        "description": "The hosts of the serving group in rank order: rank 0 is the head, which serves the API.",
    },
    "serve_profile": {
        "kind": "str",
        "pattern": r"[A-Za-z0-9_]+",
        "form": "the name of a profile",
        "description": "The profile to serve.",
    },
    "serve_profile_paths": {
        "kind": "list",
        "description": "Directories with the user's own profiles, searched after the collection's own and before C(profiles/) beside the inventory.",
    },
    "serve_deployment": {
        "kind": "str",
        "pattern": _DEPLOYMENT,
        "form": "up to 48 lower-case letters, digits, _ and -",
        "description": "The name of the deployment in container names, units and the state directory. The default is the profile's name.",
    },
    "serve_tensor_parallel": {
        "kind": "int",
        "minimum": 1,
        "maximum": 64,
        "upstream": ["TP", "NNODES"],
        "description": "Tensor parallel size. The default is the number of hosts in C(serve_nodes) divided by C(serve_pipeline_parallel).",
    },
    "serve_pipeline_parallel": {
        "kind": "int",
        "default": 1,
        "minimum": 1,
        "maximum": 64,
        "description": "Pipeline parallel size. Tensor times pipeline parallel size must be the number of hosts in C(serve_nodes).",
    },
    "serve_port": {
        "kind": "int",
        "default": 8888,
        "minimum": 1,
        "maximum": 65535,
        "upstream": ["PORT"],
        "description": "The TCP port of the API on the head.",
    },
    "serve_bind": {
        "kind": "str",
        "default": "0.0.0.0",
        "form": "an IP address of the head, or 0.0.0.0 or :: for all",
        "description": "The address that the API listens on.",
    },
    "serve_rendezvous_port": {
        "kind": "int",
        "default": 29521,
        "minimum": 1024,
        "maximum": 65535,
        "upstream": ["MASTER_PORT"],
        "description": "The TCP port on the head's fabric address where the ranks meet.",
    },
    "serve_api_key": {
        "kind": "str",
        "secret": True,
        "upstream": ["VLLM_API_KEY"],
        "description": "The API key. It is kept in one file on the head and never stands in arguments, labels or logs.",
    },
    "serve_api_key_mode": {
        "kind": "str",
        "default": "generated",
        "choices": ["generated", "none"],
        "description": "Whether a key is generated when C(serve_api_key) is not given. C(none) serves without a key.",
    },
    "serve_served_model_name": {
        "kind": "str",
        "upstream": ["SERVED_MODEL_NAME"],
        "description": "The model name in API requests. The profile gives the default.",
    },
    "serve_ready_timeout": {
        "kind": "int",
        "default": 3600,
        "minimum": 30,
        "maximum": 86400,
        "upstream": ["READY_TIMEOUT"],
        "description": "Seconds from the start of the ranks until the API must be healthy.",
    },
    "serve_stall_timeout": {
        "kind": "int",
        "default": 420,
        "minimum": 10,
        "maximum": 86400,
        "description": "Seconds without any sign of progress after which a loading group counts as stuck.",
    },
    "serve_completion_timeout": {
        "kind": "int",
        "default": 240,
        "minimum": 1,
        "maximum": 3600,
        "upstream": ["GLM53_WARMUP_REQ_TIMEOUT"],
        "description": "Seconds that one proving or warm-up request may take.",
    },
    "serve_state_root": {
        "kind": "path",
        "default": None,
        "description": "The directory of state on the nodes. The default is C(/var/lib/sparkops), without root C(~/.local/state/sparkops).",
    },
    "serve_boot": {
        "kind": "bool",
        "default": True,
        "description": "Whether the rank service of rank 0 brings the group back after a reboot or power loss of any of its nodes, without a play. "
        "A group that was stopped stays stopped.",
    },
    "serve_watch": {
        "kind": "bool",
        "default": False,
        "description": "Whether the rank service of rank 0 ends and starts the group again when a rank is gone, the engine is stuck, or canaries fail. "
        "A worker that rank 0 asks nothing for two minutes and the grace of a stop ends its rank.",
    },
    "serve_watch_interval": {
        "kind": "int",
        "default": 10,
        "minimum": 1,
        "maximum": 3600,
        "description": "Seconds between two looks of the watch at the engine's metrics.",
    },
    "serve_watch_samples": {
        "kind": "int",
        "default": 60,
        "minimum": 2,
        "maximum": 10000,
        "description": "How many looks in a row must see running requests and not one new token before the engine counts as stuck. The prefill of a long "
        "prompt gives no token either: interval times samples must be longer.",
    },
    "serve_watch_idle_watts": {
        "kind": "int",
        "default": 35,
        "minimum": 0,
        "maximum": 1000,
        "description": "An engine whose GPU draws more than this is at work, whatever its tokens. Without a reading the tokens alone decide.",
    },
    "serve_watch_canary": {
        "kind": "int",
        "default": 300,
        "minimum": 0,
        "maximum": 86400,
        "description": "Seconds between two proving completions while nobody else asks. Three that fail in a row end the group. 0 sends none.",
    },
    "serve_restart_limit": {
        "kind": "int",
        "default": 5,
        "minimum": 0,
        "maximum": 100,
        "description": "How often the rank service starts the group by itself, after reboots and by the watch, within C(serve_restart_window). Then it "
        "gives up until a play starts the group.",
    },
    "serve_restart_window": {
        "kind": "int",
        "default": 3600,
        "minimum": 60,
        "maximum": 604800,
        "description": "Seconds in which the starts of C(serve_restart_limit) are counted.",
    },
    "serve_restart_delay": {
        "kind": "int",
        "default": 10,
        "minimum": 0,
        "maximum": 1800,
        "description": "Seconds before the second start that the rank service makes by itself; each further pause is three times the last.",
    },
    "serve_extra_arguments": {
        "kind": "list",
        "default": [],
        "comma": False,
        "upstream": ["EXTRA_ARGS"],
        "description": "Further engine arguments, one item each and taken byte for byte. A mapping becomes JSON text.",
    },
    "serve_environment": {
        "kind": "dict",
        "default": {},
        "upstream": ["GLM53_EXTRA_ENV"],
        "description": "Further environment variables of the engine on all ranks. null takes a variable of the profile away.",
    },
    "serve_files": {
        "kind": "dict",
        "default": {},
        "upstream": ["EXL3_OVERLAY_HOST", "KMAP_HOST"],
        "description": "Files of the controller that are mounted read-only on all ranks, by their path in the container."
        " A relative path is one beside the inventory.",
    },
    "serve_cache_root": {
        "kind": "path",
        "scope": "node",
        "upstream": ["CACHE_ROOT", "WORKER_VLLM_CACHE", "TRITON_HOST_CACHE", "TILELANG_HOST_CACHE", "NV_HOST_CACHE"],
        "description": "The directory of compiled kernels on a node. The default is C(cache) in the deployment's state directory."
        " It must not be shared between nodes.",
    },
    "serve_warmup": {
        "kind": "bool",
        "default": True,
        "upstream": ["GLM53_BOOT_SHAPE_WARMUP", "DSV41_BOOT_SHAPE_WARMUP"],
        "description": "Whether the profile's shapes are warmed up before the group counts as ready.",
    },
    "serve_canary": {
        "kind": "bool",
        "default": True,
        "upstream": ["GLM53_WARMUP_CANARY"],
        "description": "Whether a group that answers nonsense while it says that it is healthy fails the start.",
    },
    "serve_canary_capabilities": {
        "kind": "list",
        "default": [],
        "pattern": r"image|tool|reasoning",
        "form": "a list of image, tool, and reasoning",
        "description": "What else a start must show, each by one request: an image is described, a tool is called, an answer has its reasoning apart.",
    },
    "serve_accept_rules": {
        "kind": "list",
        "default": [],
        "pattern": r"[A-Za-z0-9_.]+",
        "form": "a list of rule ids",
        "description": "Ids of rules that are accepted although they say no. Each is named in the plan's notices.",
    },
    "weights_root": {
        "kind": "path",
        "scope": "node",
        "description": "The directory of model files on a node. The default is C(weights) in the state directory.",
    },
    "bootstrap_packages": {
        "kind": "bool",
        "default": False,
        "description": "Whether bootstrap installs the packages that the nodes lack.",
    },
    "bootstrap_docker_group": {
        "kind": "bool",
        "default": False,
        "description": "Whether bootstrap adds the ssh user to the group docker.",
    },
    "bootstrap_node_keys": {
        "kind": "bool",
        "default": False,
        "description": "Whether bootstrap makes the keys and known hosts by which the nodes reach each other.",
    },
    "bootstrap_state_dir": {
        "kind": "bool",
        "default": False,
        "description": "Whether bootstrap makes the state directory with root rights and gives it to the ssh user.",
    },
    "fabric_address": {
        "kind": "str",
        "scope": "node",
        "form": "an IPv4 address of the host on the CX7 network",
        "upstream": ["HEAD_IP", "WORKER_IP", "WORKER2_IP", "WORKER3_IP"],
        "description": "The address of the host on the fabric, used only between the nodes.",
    },
    "fabric_interface": {
        "kind": "str",
        "scope": "node",
        "upstream": ["HEAD_CX7_IF", "WORKER_CX7_IF", "WORKER2_CX7_IF", "WORKER3_CX7_IF"],
        "description": "The network interface of the fabric address. The default is the interface that holds the address.",
    },
    "fabric_hcas": {
        "kind": "list",
        "scope": "node",
        "upstream": ["HEAD_CX7_IB", "WORKER_CX7_IB", "WORKER2_CX7_IB", "WORKER3_CX7_IB"],
        "description": "The RDMA devices of the fabric. The default is all devices behind the interface's port.",
    },
    "fabric_gid_policy": {
        "kind": "str",
        "default": "unpinned",
        "choices": ["unpinned", "auto", "index"],
        "upstream": ["NCCL_IB_GID_INDEX"],
        "description": "Whether NCCL picks the GID itself, gets the one found at each start, or C(fabric_gid_index).",
    },
    "fabric_gid_index": {
        "kind": "int",
        "scope": "node",
        "minimum": 0,
        "maximum": 255,
        "upstream": ["HEAD_GID", "WORKER_GID", "WORKER2_GID", "WORKER3_GID"],
        "description": "The GID index of the host with O(fabric_gid_policy=index).",
    },
}

_ENGRAM: dict[str, dict[str, t.Any]] = {
    "engram_enabled": {
        "kind": "bool",
        "default": True,
        "role": "engram",
        "description": "Whether Engram rows are packed for profiles that have them. Serving works without them, more slowly: prefill is 25 to 50 % "
        "faster with them.",
    },
    "engram_root": {
        "kind": "path",
        "scope": "node",
        "role": "engram",
        "upstream": ["HEAD_PACKED_DIR", "WORKER_PACKED_DIR"],
        "description": "Folder for row files on a local disk of the node. The default is C(engram) below the state root.",
    },
    "engram_rate_limit": {
        "kind": "size",
        "default": 0,
        "minimum": 0,
        "role": "engram",
        "description": "Bytes per second that one node may write while packing. 0 means no limit.",
    },
    "engram_memory_floor": {
        "kind": "size",
        "default": 2147483648,
        "minimum": 0,
        "role": "engram",
        "description": "MemAvailable that must stay free while packing. Below it the work is refused, or pauses if it has begun. 0 means no floor.",
    },
    "engram_priority": {
        "kind": "str",
        "default": "idle",
        "choices": ["idle", "normal"],
        "role": "engram",
        "description": "C(idle) gives way to everything else on the node that wants the processor or the disk; C(normal) does not.",
    },
}

_FABRIC: dict[str, dict[str, t.Any]] = {
    "fabric_rdma": {
        "kind": "str",
        "default": "auto",
        "choices": ["auto", "require"],
        "role": "fabric",
        "description": "Whether a group without RDMA between all ranks is served over sockets with a notice, or refused.",
    },
    "fabric_topology": {
        "kind": "str",
        "default": "auto",
        "choices": ["auto", "pair", "dual_rail", "switch", "ring", "open_ring"],
        "role": "fabric",
        "description": "The shape of the cabling. Anything but auto is compared with what is found; open_ring accepts that opposite ranks have no "
        "path, which needs a patched NCCL.",
    },
    "fabric_probe": {
        "kind": "str",
        "default": "auto",
        "choices": ["auto", "always", "never"],
        "role": "fabric",
        "description": "When rails and the meeting port are tested. auto: unless the group has met already, that is, its port is held on the head.",
    },
    "fabric_sys_root": {
        "kind": "path",
        "role": "fabric",
        "description": "Root of the sysfs tree on the nodes, for tests.",
    },
    "fabric_proc_root": {
        "kind": "path",
        "role": "fabric",
        "description": "Root of the proc tree on the nodes, for tests.",
    },
    "fabric_etc_root": {
        "kind": "path",
        "role": "fabric",
        "description": "Where network configuration files lie on the nodes, for tests.",
    },
    "fabric_configure": {
        "kind": "bool",
        "default": False,
        "choices": [],
        "role": "fabric",
        "description": "Whether the role writes a netplan file for the fabric rails (addresses, MTU, no IPv6). A change that cuts the node off is "
        "taken back by itself.",
    },
    "fabric_rail_addresses": {
        "kind": "dict",
        "scope": "node",
        "role": "fabric",
        "description": "Interface to list of addresses with prefix length, for fabric_configure. The default is what the rails have now.",
    },
    "fabric_mtu": {
        "kind": "int",
        "default": 9000,
        "minimum": 1280,
        "maximum": 9978,
        "role": "fabric",
        "description": "MTU that fabric_configure gives to every rail.",
    },
    "fabric_return_seconds": {
        "kind": "int",
        "default": 120,
        "minimum": 30,
        "maximum": 3600,
        "role": "fabric",
        "description": "Time after which an unconfirmed change of fabric_configure is taken back.",
    },
    "fabric_bandwidth_floor": {
        "kind": "float",
        "default": 0,
        "minimum": 0,
        "maximum": 800,
        "role": "fabric",
        "description": "Gb/s that each rail must move; above 0 it is measured with ib_write_bw before a group starts (perftest on the nodes).",
    },
}

_IMAGE: dict[str, dict[str, t.Any]] = {
    "image_reference": {
        "kind": "str",
        "role": "image",
        "pattern": r"[^\s@]+:[\w.-]+",
        "form": "an image reference with a tag and without a digest",
        "upstream": ["IMAGE"],
        "description": "The container image with its tag. The profile gives the default.",
    },
    "image_digest": {
        "kind": "str",
        "role": "image",
        "pattern": r"sha256:[0-9a-f]{64}",
        "form": "sha256: and 64 hexadecimal digits",
        "description": "The registry digest that pins the image. A profile's pin holds only for the profile's own reference.",
    },
    "image_pull_policy": {
        "kind": "str",
        "default": "missing",
        "choices": ["missing", "always", "never"],
        "role": "image",
        "upstream": ["PULL", "SKIP_PULL"],
        "description": "When the registry is asked. C(missing) pulls an image that is not there, C(always) also follows a tag that has moved (an "
        "explicit upgrade), C(never) uses what is there.",
    },
    "image_pull_on": {
        "kind": "str",
        "default": "every",
        "choices": ["every", "head"],
        "role": "image",
        "description": "Which ranks may pull. C(every) lets each rank that reaches the registry pull by itself; C(head) pulls once and ships over the"
        " fabric.",
    },
    "image_registry_username": {
        "kind": "str",
        "role": "image",
        "upstream": ["GHCR_USER"],
        "description": "Account at the image's registry. It is sent with the pull and stored nowhere.",
    },
    "image_registry_password": {
        "kind": "str",
        "secret": True,
        "role": "image",
        "upstream": ["GHCR_TOKEN"],
        "description": "Password or token of C(image_registry_username). It is sent with the pull and stored nowhere.",
    },
    "image_ship_mode": {
        "kind": "str",
        "default": "auto",
        "choices": ["auto", "layers", "archive", "stream", "never"],
        "role": "image",
        "upstream": ["IMAGE_SHIP", "SKIP_SHIP"],
        "description": "How a rank that cannot pull gets the image from the head. C(auto) sends only missing layers and picks by what is there and by"
        " the space left; C(never) refuses instead.",
    },
    "image_staging": {
        "kind": "path",
        "scope": "node",
        "role": "image",
        "upstream": ["IMAGE_SHIP_DIR", "WORKER_IMAGE_SHIP_DIR"],
        "description": "Directory for image parts on their way, on the head and on the workers. The default is C(image-ship) below the state root. It"
        " must have room for what is missing.",
    },
    "image_build": {
        "kind": "str",
        "default": "never",
        "choices": ["never", "when_unavailable", "on_stamp_change", "always"],
        "role": "image",
        "upstream": ["BUILD", "SKIP_BUILD"],
        "description": "Whether the image may be built on the head from C(image_recipe). Compiling CUDA code takes an hour, so nothing is built "
        "unless asked for.",
    },
    "image_recipe": {
        "kind": "path",
        "role": "image",
        "description": "Checkout of the image's recipe on the head. Its stamp is compared with the label of the image, and C(image_build) builds from"
        " it.",
    },
    "image_recipe_repository": {
        "kind": "str",
        "role": "image",
        "description": "Address of the recipe's git repository. The head then has C(image_recipe_commit) of it in C(image_recipe), by default in the "
        "deployment's own directory.",
    },
    "image_recipe_commit": {
        "kind": "str",
        "form": "a full commit of 40 hexadecimal digits",
        "role": "image",
        "description": "The commit of C(image_recipe_repository). A branch or tag may be another recipe tomorrow, so it is none.",
    },
    "image_build_inputs": {
        "kind": "dict",
        "role": "image",
        "description": "Files on the head, by their path in the build context, that a build without network needs (for example a source tarball or a "
        "wheel).",
    },
    "image_build_args": {
        "kind": "dict",
        "role": "image",
        "description": "Further build arguments of the recipe.",
    },
    "image_build_base": {
        "kind": "str",
        "role": "image",
        "description": "Local image to use for the first FROM of the recipe instead of one with a digest, which a builder without network cannot "
        "resolve.",
    },
    "image_self_check": {
        "kind": "bool",
        "default": True,
        "role": "image",
        "upstream": ["SKIP_OVERLAY_VERIFY"],
        "description": "Whether the profile's self-check runs in a throw-away container on every rank where the image is not yet proven.",
    },
    "image_template_source": {
        "kind": "path",
        "role": "image",
        "description": "Directory on the nodes with the model's chat template, for the parity test of tag selftest.",
    },
    "image_probe_timeout": {
        "kind": "int",
        "default": 20,
        "minimum": 1,
        "maximum": 600,
        "role": "image",
        "description": "Seconds after which a registry that does not answer counts as unreachable.",
    },
}

_LEAD: dict[str, dict[str, t.Any]] = {
    "serve_drain_timeout": {
        "kind": "int",
        "default": 60,
        "minimum": 0,
        "maximum": 3600,
        "role": "serve",
        "description": "Seconds that stop, restart, and switch wait for running requests to end. The API takes new ones meanwhile. 0 does not wait.",
    },
    "serve_rollback": {
        "kind": "str",
        "default": "never",
        "choices": ["never", "auto"],
        "role": "serve",
        "description": "Whether a group that does not come up is replaced by itself with what was proven last. The run fails all the same.",
    },
    "serve_history_keep": {
        "kind": "int",
        "default": 10,
        "minimum": 1,
        "maximum": 100,
        "role": "serve",
        "description": "How many proven deployments are kept on record. Their images and weights stay until play prune.",
    },
    "serve_collect_on_failure": {
        "kind": "bool",
        "default": True,
        "role": "serve",
        "description": "Whether a failed start leaves a bundle of evidence on the controller.",
    },
    "rollback_to": {
        "kind": "str",
        "pattern": r"[0-9a-f]{12}",
        "form": "an id that play history lists",
        "role": "rollback",
        "description": "The record that play rollback returns to. The default is what was proven last, or the one before it when that runs.",
    },
    "prune_keep": {
        "kind": "int",
        "default": 2,
        "minimum": 1,
        "maximum": 100,
        "role": "prune",
        "description": "How many proven deployments play prune keeps with all that they need. What was proven last always stays.",
    },
    "uninstall_weights": {
        "kind": "bool",
        "default": False,
        "role": "uninstall",
        "description": "Whether play uninstall also removes the model files.",
    },
    "uninstall_images": {
        "kind": "bool",
        "default": True,
        "role": "uninstall",
        "description": "Whether play uninstall also removes the images, unless another container was made from them.",
    },
    "collect_dir": {
        "kind": "path",
        "default": "~/sparkops-bundles",
        "role": "collect",
        "description": "The folder on the controller that bundles of evidence are written to.",
    },
    "collect_seconds": {
        "kind": "int",
        "default": 30,
        "minimum": 5,
        "maximum": 600,
        "role": "collect",
        "description": "Seconds that a node may take to collect its evidence.",
    },
    "serve_stop_grace": {
        "kind": "int",
        "default": 60,
        "minimum": 0,
        "maximum": 3600,
        "role": "serve",
        "description": "Seconds between the polite and the hard signal when a rank is stopped.",
    },
    "status_format": {
        "kind": "str",
        "default": "text",
        "choices": ["text", "json"],
        "role": "status",
        "description": "How play status prints.",
    },
    "status_file": {
        "kind": "path",
        "role": "status",
        "description": "File on the controller that play status also writes its JSON to.",
    },
    "status_settings": {
        "kind": "bool",
        "default": False,
        "role": "status",
        "description": "Whether play status also tells each effective setting with the class of its origin, and what a start would change on each rank.",
    },
    "logs_of": {
        "kind": "str",
        "default": "all",
        "choices": ["head", "worker", "all"],
        "role": "logs",
        "description": "Whose log play logs shows.",
    },
    "logs_tail": {
        "kind": "int",
        "default": 100,
        "minimum": 1,
        "maximum": 100000,
        "role": "logs",
        "upstream": ["TAIL"],
        "description": "How many of the last lines play logs shows.",
    },
    "logs_follow": {
        "kind": "int",
        "default": 0,
        "minimum": 0,
        "maximum": 86400,
        "role": "logs",
        "description": "Seconds for which play logs goes on and prints new lines as they come, each with its node. 0 does not.",
    },
}

_MEMORY: dict[str, dict[str, t.Any]] = {
    "memory_floor": {
        "kind": "size",
        "default": "2 GiB",
        "minimum": 0,
        "role": "memory",
        "description": "Memory that must be available on a node when the profile has no memory data.",
    },
    "memory_tenant_size": {
        "kind": "size",
        "default": "1 GiB",
        "minimum": 0,
        "role": "memory",
        "description": "The size from which another process or container is named as a tenant of the node's memory.",
    },
    "memory_wait": {
        "kind": "int",
        "default": 300,
        "minimum": 0,
        "maximum": 3600,
        "role": "memory",
        "description": "Seconds to wait after a stop until the memory of each node is back near its idle level. What is still held then is named, and"
        " nothing starts.",
    },
    "memory_tolerance": {
        "kind": "size",
        "default": "2 GiB",
        "minimum": 0,
        "role": "memory",
        "description": "How far below its idle level the available memory of a node may stay after a stop.",
    },
    "memory_evict": {
        "kind": "bool",
        "default": True,
        "role": "memory",
        "description": "Whether the page cache of the weights is given up after they were copied and before the engine starts. This needs no root "
        "rights.",
    },
    "memory_drop_caches": {
        "kind": "bool",
        "default": False,
        "role": "memory",
        "upstream": ["GLM53_HOST_MEM_HYGIENE"],
        "description": "Whether the page cache of the whole machine is dropped too, where root rights exist.",
    },
    "memory_guard_loading": {
        "kind": "bool",
        "default": True,
        "role": "memory",
        "description": "Whether the node service stops the whole group when memory runs out while it loads, that is until the group was proven.",
    },
    "memory_guard_loading_floor": {
        "kind": "size",
        "default": "2 GiB",
        "minimum": 0,
        "role": "memory",
        "description": "The level of available memory at which the loading guard acts.",
    },
    "memory_guard_serving": {
        "kind": "bool",
        "default": False,
        "role": "memory",
        "upstream": ["DSV41_MEM_GUARD"],
        "description": "Whether the node service stops the whole group when memory runs out while it serves. It can't know who is to blame.",
    },
    "memory_guard_serving_floor": {
        "kind": "size",
        "default": "1.5 GiB",
        "minimum": 0,
        "role": "memory",
        "upstream": ["DSV41_MEM_GUARD_GIB"],
        "description": "The level of available memory at which the serving guard acts.",
    },
    "memory_guard_samples": {
        "kind": "int",
        "default": 2,
        "minimum": 1,
        "maximum": 60,
        "role": "memory",
        "description": "How many samples in a row must be below the floor before a guard acts.",
    },
    "memory_prompt_tokens": {
        "kind": "int",
        "minimum": 1,
        "maximum": 10000000,
        "role": "memory",
        "description": "Length of the prompt that play memory_prompt sends. The default is the longest that C(serve_max_model_len) allows.",
    },
    "memory_prompt_floor": {
        "kind": "size",
        "default": "1.5 GiB",
        "minimum": 0,
        "role": "memory",
        "description": "Memory that must stay available on every node while the long prompt of play memory_prompt runs.",
    },
    "memory_swappiness": {
        "kind": "int",
        "minimum": 0,
        "maximum": 200,
        "role": "memory",
        "description": "What play memory_policy sets C(vm.swappiness) to, now and at boot. With 0 the kernel swaps only as the last resort. Without a value it "
        "is left alone.",
    },
    "memory_jobs_limit": {
        "kind": "size",
        "minimum": 0,
        "role": "memory",
        "description": "Memory of all other jobs on a node together, as the limit of the slice C(sparkops-jobs) that play memory_policy makes. Without a value "
        "there is no slice.",
    },
    "memory_guard_interval": {
        "kind": "float",
        "default": 0.5,
        "minimum": 0.1,
        "maximum": 10,
        "role": "memory",
        "description": "Seconds between two samples of a guard.",
    },
}

_TOOLS: dict[str, dict[str, t.Any]] = {
    "render_directory": {
        "kind": "str",
        "role": "render",
        "description": "Directory on the controller for the rendered files. The default is C(rendered/) and the deployment's name beside the "
        "inventory.",
    },
    "settings_compare": {
        "kind": "bool",
        "default": True,
        "role": "settings",
        "description": "Whether play settings also looks at what runs. Without it no node is reached.",
    },
    "adopt_env_file": {
        "kind": "str",
        "role": "launcher_env",
        "description": "The .env file of a launch script on the first host. It is read as data and never executed.",
    },
    "adopt_recipe": {
        "kind": "str",
        "choices": ["deepseek", "glm"],
        "role": "launcher_env",
        "description": "Which recipe the .env file belongs to, when the file does not say.",
    },
    "adopt_containers": {
        "kind": "list",
        "default": [],
        "role": "adopt",
        "description": "Further container names of a launch script, when it was told to use others.",
    },
    "adopt_stop": {
        "kind": "bool",
        "default": False,
        "role": "adopt",
        "description": "Whether the containers of a launch script are stopped and the new group takes their place. None is removed, and when the new group "
        "cannot be proven they are started again.",
    },
    "adopt_restore": {
        "kind": "bool",
        "default": False,
        "role": "adopt",
        "description": "Whether the containers that were stopped are started again. The new group must be stopped first.",
    },
    "adopt_caches": {
        "kind": "bool",
        "default": True,
        "role": "adopt",
        "description": "Whether compiled kernels of a launch script are linked into the deployment's caches.",
    },
    "adopt_caches_from": {
        "kind": "list",
        "default": ["~/.cache/vllm-dsv41-flash-exl3", "~/.cache/vllm-glm53-flash"],
        "role": "adopt",
        "description": "Directories on the nodes with compiled kernels of a launch script.",
    },
}

_WEIGHT_SYNC: dict[str, dict[str, t.Any]] = {
    "weight_sync_method": {
        "kind": "str",
        "default": "auto",
        "choices": ["auto", "rsync", "nfs", "zfs"],
        "role": "weight_sync",
        "upstream": ["WEIGHT_SYNC", "NFS_SHARE"],
        "description": "How the workers get the files of the head. C(rsync) copies them, C(zfs) keeps a replica of the head's dataset, C(nfs) mounts "
        "the head's folders. C(auto) says what fits and takes the first of them that does; any other value is taken or refused.",
    },
    "weight_sync_packages": {
        "kind": "bool",
        "default": False,
        "role": "weight_sync",
        "description": "Whether packages that the method needs are installed: nfs-kernel-server on the head, nfs-common on the workers, zfsutils-linux.",
    },
    "weight_sync_zfs_dataset": {
        "kind": "str",
        "scope": "node",
        "role": "weight_sync",
        "pattern": r"[A-Za-z0-9][A-Za-z0-9_.:-]*(/[A-Za-z0-9][A-Za-z0-9_.:-]*)+",
        "form": "a dataset below a pool, such as tank/weights",
        "description": "Dataset of this node for the method C(zfs). On the head it is mounted at C(weights_root); on a worker it is a replica that only "
        "ever receives. One dataset holds all artefacts.",
    },
    "weight_sync_zfs_device": {
        "kind": "path",
        "scope": "node",
        "role": "weight_sync",
        "description": "Disk on which the pool of C(weight_sync_zfs_dataset) is made when there is none. It must be proven empty.",
    },
    "weight_sync_zfs_discard": {
        "kind": "bool",
        "default": False,
        "role": "weight_sync",
        "description": "Whether content of a replica that the head does not have, or snapshots newer than the one of a rollback, may be given up. "
        "Without it they are named and nothing is done.",
    },
    "weight_sync_zfs_keep": {
        "kind": "int",
        "default": 2,
        "minimum": 1,
        "maximum": 1000,
        "role": "weight_sync",
        "description": "How many snapshots of the collection stay on each node.",
    },
    "weight_sync_zfs_snapshot": {
        "kind": "str",
        "role": "weight_sync",
        "description": "Snapshot that play C(zfs_rollback) goes back to, on every node.",
    },
    "weight_sync_policy": {
        "kind": "str",
        "default": "auto",
        "choices": ["auto", "verify_only", "force"],
        "role": "weight_sync",
        "upstream": ["SKIP_SYNC", "FORCE_SYNC"],
        "description": "C(auto) copies what is missing or different, C(verify_only) only checks, C(force) compares every file by hash and copies what"
        " differs.",
    },
    "weight_sync_verify": {
        "kind": "bool",
        "default": False,
        "role": "weight_sync",
        "description": "Read all files again on all cores and compare their hashes. The tag C(verify) does the same.",
    },
    "weight_sync_transport": {
        "kind": "str",
        "default": "ssh",
        "choices": ["ssh", "fabric"],
        "role": "weight_sync",
        "description": "C(ssh) encrypts with AES-GCM. C(fabric) sends unencrypted over the fabric addresses only, for the time of the copy, with a "
        "one-time secret; content is proven by hash either way.",
    },
    "weight_sync_streams": {
        "kind": "int",
        "default": 4,
        "minimum": 1,
        "maximum": 32,
        "role": "weight_sync",
        "description": "Streams per worker, balanced by size and spread over all rails; over ssh no more than the worker has cores.",
    },
    "weight_sync_rails": {
        "kind": "list",
        "default": [],
        "scope": "node",
        "role": "weight_sync",
        "description": "All fabric addresses of this node, one per rail. Without it the fabric address is the only rail.",
    },
    "weight_sync_topology": {
        "kind": "str",
        "default": "chain",
        "choices": ["chain", "star"],
        "role": "weight_sync",
        "description": "With several workers, C(chain) lets each worker read from the one before it, file by file, so that the head sends each byte "
        "once. C(star) lets all read from the head.",
    },
    "weight_sync_space_margin": {
        "kind": "size",
        "default": 2147483648,
        "minimum": 0,
        "role": "weight_sync",
        "description": "Bytes that must stay free on the filesystem of the copies.",
    },
    "weight_sync_stall_timeout": {
        "kind": "int",
        "default": 120,
        "minimum": 5,
        "maximum": 86400,
        "role": "weight_sync",
        "description": "Seconds without a byte on the disk after which a copy is tried again, and then given up.",
    },
}

_WEIGHTS: dict[str, dict[str, t.Any]] = {
    "weights_download": {
        "kind": "str",
        "default": "missing",
        "choices": ["missing", "never", "refresh"],
        "role": "weights",
        "upstream": ["AUTO_DOWNLOAD", "SKIP_DOWNLOAD", "REFRESH_WEIGHTS"],
        "description": "Whether files are fetched. C(missing) fetches what is not there, C(never) only checks, C(refresh) asks the hub again and "
        "compares every file by hash.",
    },
    "weights_verify": {
        "kind": "bool",
        "default": False,
        "role": "weights",
        "description": "Read all files again on all cores and compare their hashes. The tag C(verify) does the same.",
    },
    "weights_accept_licences": {
        "kind": "list",
        "default": [],
        "role": "weights",
        "description": "Artefacts or licences whose terms are accepted, for those that the profile does not let be fetched without asking.",
    },
    "weights_adopt_from": {
        "kind": "list",
        "default": ["~/.cache/huggingface/hub"],
        "role": "weights",
        "upstream": ["HF_HOME", "MODEL_HOST", "ENGRAM_DIR"],
        "description": "Folders on the node that may hold complete trees already: a hub cache in any layout, or a plain download folder. They are "
        "adopted by the pinned commit, with hard links. C(~) is the home of the node's account.",
    },
    "weights_adopt_copy": {
        "kind": "bool",
        "default": False,
        "role": "weights",
        "description": "Copy an adopted tree that lies on another filesystem; without this it is refused.",
    },
    "weights_hub_endpoint": {
        "kind": "str",
        "default": "https://huggingface.co",
        "role": "weights",
        "upstream": ["HF_ENDPOINT"],
        "description": "Address of the hub.",
    },
    "weights_hub_token": {
        "kind": "str",
        "secret": True,
        "role": "weights",
        "upstream": ["HF_TOKEN"],
        "description": "Access token for the hub. It reaches only the download process.",
    },
    "weights_hub_token_file": {
        "kind": "path",
        "scope": "node",
        "role": "weights",
        "description": "File on the head, mode 0600, that holds the access token.",
    },
    "weights_hub_wheels": {
        "kind": "path",
        "role": "weights",
        "description": "Folder on the controller with the pinned wheels of huggingface_hub. Without it the controller's pip fetches them once.",
    },
    "weights_hub_timeout": {
        "kind": "int",
        "default": 60,
        "minimum": 5,
        "maximum": 3600,
        "role": "weights",
        "description": "Seconds without an answer from the hub after which one request is given up.",
    },
    "weights_stall_timeout": {
        "kind": "int",
        "default": 120,
        "minimum": 5,
        "maximum": 86400,
        "role": "weights",
        "description": "Seconds without a byte on the disk after which an attempt ends and the next way is tried.",
    },
    "weights_rate_limit_wait": {
        "kind": "int",
        "default": 1800,
        "minimum": 0,
        "maximum": 86400,
        "role": "weights",
        "description": "Seconds that a download may wait in total because the hub asks for it.",
    },
    "weights_ranged_above": {
        "kind": "size",
        "default": 1000000000,
        "minimum": 0,
        "role": "weights",
        "description": "Larger files are fetched by ranges, with resume inside the file.",
    },
    "weights_range_part": {
        "kind": "size",
        "default": 67108864,
        "minimum": 65536,
        "role": "weights",
        "description": "Smallest part of a ranged download.",
    },
    "weights_streams": {
        "kind": "int",
        "default": 8,
        "minimum": 1,
        "maximum": 64,
        "role": "weights",
        "description": "Connections to the hub at the same time.",
    },
    "weights_space_margin": {
        "kind": "size",
        "default": 2147483648,
        "minimum": 0,
        "role": "weights",
        "description": "Bytes that must stay free on a filesystem that files are written to.",
    },
}

_OWNER: dict[str, dict[str, t.Any]] = {
    "report_directory": {
        "kind": "path",
        "role": "report",
        "description": "Directory on the controller for reports and benchmarks, with one below it for each deployment. The default is"
        " C(sparkops/reports) below C(XDG_STATE_HOME), else below C(~/.local/state).",
    },
    "bench_kinds": {
        "kind": "list",
        "default": ["counting", "prose"],
        "choices": ["counting", "prose"],
        "role": "bench",
        "description": "What play bench lets the model write: C(counting), which drafts guess well, and C(prose), which they do not.",
    },
    "bench_streams": {
        "kind": "list",
        "default": [1, 2, 4],
        "pattern": r"[1-9][0-9]{0,2}",
        "form": "a list of numbers from 1 to 999",
        "digits": True,
        "role": "bench",
        "description": "How many answers play bench lets the model write at the same time, one case each.",
    },
    "bench_runs": {
        "kind": "int",
        "default": 5,
        "minimum": 1,
        "maximum": 100,
        "role": "bench",
        "description": "How often play bench repeats each case of decoding.",
    },
    "bench_tokens": {
        "kind": "int",
        "default": 400,
        "minimum": 8,
        "maximum": 100000,
        "role": "bench",
        "description": "How many tokens each answer has in play bench.",
    },
    "bench_prefill": {
        "kind": "list",
        "default": [8192, 16384, 32768, 65536, 131072, 262144, 455000, 601000],
        "pattern": r"[1-9][0-9]{0,7}",
        "form": "a list of numbers of tokens",
        "digits": True,
        "role": "bench",
        "description": "The ladder of prompt lengths in play bench. What does not fit into the context is left out; C([]) leaves all out.",
    },
    "bench_timeout": {
        "kind": "int",
        "default": 1800,
        "minimum": 1,
        "maximum": 86400,
        "role": "bench",
        "description": "Seconds that one request of play bench may take.",
    },
    "metrics_exporter": {
        "kind": "bool",
        "default": False,
        "role": "metrics",
        "description": "Whether the nodes tell Prometheus about memory, ranks and the group, through the text files of its node exporter. False"
        " takes our part away again.",
    },
    "metrics_textfile_directory": {
        "kind": "path",
        "default": "/var/lib/prometheus/node-exporter",
        "role": "metrics",
        "description": "The directory on the nodes that the node exporter reads text files from.",
    },
    "metrics_probe_interval": {
        "kind": "int",
        "default": 60,
        "minimum": 0,
        "maximum": 86400,
        "role": "metrics",
        "description": "Seconds without a generated token after which the exporter on the head asks for one, to tell a wedged group from an idle one."
        " 0 means never.",
    },
    "metrics_node_port": {
        "kind": "int",
        "default": 9100,
        "minimum": 1,
        "maximum": 65535,
        "role": "metrics",
        "description": "The port of the node exporter, for the list of scrape targets.",
    },
}

TABLE: dict[str, dict[str, t.Any]] = {**_GROUP, **_ENGRAM, **_FABRIC, **_IMAGE, **_LEAD, **_MEMORY, **_OWNER, **_TOOLS, **_WEIGHT_SYNC, **_WEIGHTS}
