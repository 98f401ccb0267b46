"""Making one container, from the request to its start."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from skerry.errors import Conflict, InvalidSpec, NotFound, ProviderError
from skerry.providers import volume_plan
from skerry.providers.base import Enforcement
from skerry.providers.incus import images, instances, profile
from skerry.providers.incus.api import PROVIDER, Api
from skerry.providers.incus.cluster import Cluster
from skerry.providers.incus.image_config import ImageConfig
from skerry.providers.incus.info import Info
from skerry.providers.incus.instances import IMAGE
from skerry.providers.incus.networks import Networks
from skerry.providers.incus.profile import Frame
from skerry.providers.incus.refusals import AddressTaken
from skerry.providers.incus.runtime import Runtime
from skerry.providers.incus.snapshots import Snapshots
from skerry.providers.incus.volumes import Volumes, device
from skerry.providers.limits import Limits
from skerry.providers.mounts import check_source
from skerry.spec import Network, SandboxId, Spec

_NAME_TAKEN = ("already exists", "unique constraint failed")


class Creator:
    """Makes containers. It undoes nothing: whoever asked for one destroys what is left of it."""

    def __init__(
        self, api: Api, runtime: Runtime, volumes: Volumes, snapshots: Snapshots, networks: Networks, timeout_s: float
    ) -> None:
        self._api = api
        self._runtime = runtime
        self._volumes = volumes
        self._snapshots = snapshots
        self._networks = networks
        self._timeout_s = timeout_s
        self._cluster = Cluster(api)

    def check(self, spec: Spec) -> None:
        """Refuse what can be told to be wrong without asking anybody."""
        if spec.snapshot is None:
            images.check_name(image_name(spec))
        for mount in spec.mounts:
            check_source(mount)

    async def origin(self, spec: Spec) -> dict[str, Enforcement]:
        """What it is made of. A snapshot may be taken only once there is a place for its box."""
        if spec.snapshot is not None:
            return {}
        image = await self._image(spec)
        return {"image": Enforcement(by=f"{spec.image} at {image.id[:12]}")}

    async def make(self, id: SandboxId, spec: Spec, limits: Limits, info: Info) -> None:
        """A container that is made and started."""
        wanted = volume_plan.wanted(PROVIDER, id, spec)
        home = await self._volumes.home(info.pool, wanted) if info.server.server_clustered else None
        async with self._cluster.member(id, spec, info, home) as member, self._networks.reserving(id):
            image, runtime, card = await self._image(spec), await self._runtime.devices(info, member), None
            if spec.network is Network.BRIDGE:
                card = await self._networks.card(id)
            await self._volumes.make(info.pool, wanted, member, spec.disk)
            frame = Frame(
                image=image,
                limits=limits,
                argv=self._runtime.argv,
                pool=info.pool,
                has_quotas=info.has_quotas,
                runtime=runtime,
                volumes=wanted,
                volume_devices={f"volume{number}": device(info.pool, each) for number, each in enumerate(wanted)},
                labels=_labels(id, spec),
                card=card,
            )
            await self._start(id, spec, frame, {"target": member} if member else {})

    async def _start(self, id: SandboxId, spec: Spec, frame: Frame, query: dict[str, str]) -> None:
        """Of an address that a container of another project has, Incus tells only now: then it is made with the next.
        A conflict is told only of the box's name, as it means that there is nothing of ours."""
        refused: set[str] = set()
        while True:
            body = profile.instance(id, spec, frame)
            try:
                await self._api.do("POST", "/1.0/instances", query=query, json=body, timeout_s=self._timeout_s)
                return
            except AddressTaken:
                if frame.card is None:
                    raise
                refused.add(frame.card.address)
            except Conflict as error:
                if any(sign in str(error).lower() for sign in _NAME_TAKEN):
                    raise
                raise ProviderError(str(error)) from error
            with suppress(NotFound):
                await self._api.do("DELETE", instances.path(id), timeout_s=self._timeout_s)
            frame = msgspec.structs.replace(frame, card=await self._networks.card(id, refused))

    async def _image(self, spec: Spec) -> ImageConfig:
        if spec.snapshot is not None:
            return await self._snapshots.resolve(spec.snapshot)
        return await images.resolve(self._api, image_name(spec))


def _labels(id: SandboxId, spec: Spec) -> dict[str, str]:
    asked = f"{images.SNAPSHOTS}{spec.snapshot}" if spec.snapshot is not None else image_name(spec)
    return {
        **spec.labels,
        "skerry": PROVIDER,
        "skerry.sandbox": id,
        "skerry.project": spec.project,
        IMAGE: asked,
    }


def image_name(spec: Spec) -> str:
    """The name of the image that a box is made of."""
    if spec.image is None:
        raise InvalidSpec("image: a container needs one; give image= or --image", field="image")
    return spec.image
