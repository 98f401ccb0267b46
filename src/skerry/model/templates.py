"""Templates: what a sandbox is that is asked for by the name of a template, as E2B's clients do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from skerry.model.spec import SpecOptions


class Template(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One template. What is left out is as the installation is set."""

    provider: str = ""
    image: str = ""
    snapshot: str = ""
    memory: int | str = ""
    cpus: float = 0.0
    disk: int | str = ""
    pids: int = 0
    user: str = "user"
    """Whose commands and files are those of calls that name no user; it is in the image."""
    writable_root: bool = False
    """Whether its sandboxes may change the files of the image, and not only their own folders."""
    admin: bool = False
    """Whether the box is root's, so that calls may name any user of the image, and `sudo` works."""
    allow: tuple[str, ...] = ()
    """What its sandboxes may reach, as rules; a request may ask for less."""
    network: str = ""
    """A network of the provider's, such as `bridge`, in the place of rules."""
    env: dict[str, str] = {}
    command: tuple[str, ...] | str = ""
    """What is started in each of its sandboxes."""

    def options(self) -> SpecOptions:
        """What it says of a spec."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        if self.admin or not self.image:  # a box without an image has its own, one that is root's becomes any
            del fields["user"]
        return {name: value for name, value in fields.items() if value}  # type: ignore[return-value]


BASE = Template()
