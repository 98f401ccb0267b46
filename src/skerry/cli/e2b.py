"""`skerry e2b`: what E2B's clients need to know of this server."""

from __future__ import annotations

import os
import shlex

import click

from skerry.cli.keeper import with_keeper
from skerry.cli.options import load_config
from skerry.cli.output import json_option, print_one, say
from skerry.config import Config


@click.group()
def e2b() -> None:
    """Use E2B's SDKs with `skerry serve`."""


@e2b.command()
@click.option("--domain", is_flag=True, help="For domain mode: names below server.e2b_domain, and TLS.")
@click.option("--key", metavar="KEY", help="The key to use; a new one is made if none is given.")
@click.option("--tenant", metavar="NAME", help="The tenant that a new key is of; without one it sees all of the host.")
@json_option
def env(domain: bool, key: str | None, tenant: str | None, as_json: bool) -> None:
    """Print the variables by which E2B's SDKs find the server of this host: eval "$(skerry e2b env)"."""
    config = load_config()
    if not config.server.e2b:
        raise click.ClickException("E2B's clients are not served: server.e2b is false")
    variables = _domain_variables(config) if domain else _plain_variables(config)
    variables["E2B_API_KEY"] = key or _issue(tenant)
    print_one(as_json, variables, *(f"export {name}={shlex.quote(value)}" for name, value in variables.items()))


def _plain_variables(config: Config) -> dict[str, str]:
    scheme = "https" if config.server.tls_cert and not config.server.e2b_domain else "http"
    url = f"{scheme}://{config.server.e2b_listen[0]}"
    return dict.fromkeys(("E2B_API_URL", "E2B_SANDBOX_URL", "E2B_VOLUME_API_URL"), url)


def _domain_variables(config: Config) -> dict[str, str]:
    """Those of domain mode, with files of the certificates to trust where the authority is our own."""
    settings = config.server
    if not settings.e2b_domain:
        raise click.ClickException("there is no domain: set server.e2b_domain, or serve with --e2b-domain")
    port = settings.e2b_listen[0].rpartition(":")[2]
    variables = {"E2B_DOMAIN": settings.e2b_domain if port == "443" else f"{settings.e2b_domain}:{port}"}
    if settings.e2b_tls_cert:
        return variables
    from skerry.gate import ca
    from skerry.host import folders
    from skerry.surfaces.e2b.tls import ca_folder

    folder = ca_folder(config)
    files = {"SSL_CERT_FILE": ca.bundle(folder), "NODE_EXTRA_CA_CERTS": ca.certificate(folder).encode()}
    for name, data in files.items():
        path = folder / f"{name.lower()}.pem"
        with folders.whole_or_not_at_all(path, 0o644) as write:
            write(memoryview(data))
        variables[name] = str(path)
    return variables


def _issue(tenant: str | None) -> str:
    issued = with_keeper(
        lambda keeper: keeper.issue(
            tenant=tenant,
            scopes=None,
            lifetime_s=None,
            note="skerry e2b env",
            created_by=f"uid:{os.getuid()}",
            e2b=True,
        )
    )
    say(f"token {issued.token.id} was made for this: `skerry token rm {issued.token.id}` revokes it")
    return issued.text
