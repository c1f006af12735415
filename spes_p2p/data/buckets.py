"""Buckets that speak S3."""

from __future__ import annotations

import os
import re
from typing import Any

from obstore.store import S3Store

from spes_p2p.errors import ConfigError, one_line

CLIENT = {"allow_http": True, "connect_timeout": "15s", "read_timeout": "5m", "timeout": "1day"}
"""Http is for one's own server, named by AWS_ENDPOINT_URL. A chunk has five minutes, and a file a day."""
RETRIES = 3
ENDPOINTS = {"AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"}
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_BUCKET = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([\w./-]*))?", re.ASCII)


def open_bucket(place: str) -> S3Store:
    """Open `s3://BUCKET/PREFIX`; boto3, if it is installed, finds credentials, region and endpoint in `~/.aws` too.

    No client of boto3 is made for that: it would cost half a second.

    Raises:
        ConfigError: the name has another form, or credentials are missing.
    """
    form = _BUCKET.fullmatch(place)
    if form is None:
        raise ConfigError("no bucket has a name of that form; name s3://BUCKET/PREFIX, and no credentials")
    options: dict[str, Any] = {"client_options": CLIENT, "retry_config": {"max_retries": RETRIES}}
    try:
        import botocore.session
        from boto3.session import Session
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        if not all(map(os.environ.get, KEYS)):
            raise ConfigError(
                f"{place} needs credentials: set {' and '.join(KEYS)}, or for those of ~/.aws run: "
                f"pip install 'spes-p2p[s3]', or ./scripts/setup.sh s3 in a checkout"
            ) from error
    else:
        try:
            core = botocore.session.Session()  # boto3's own would keep credentials that have been renewed meanwhile
            options["credential_provider"] = Boto3CredentialProvider(Session(botocore_session=core))
            endpoint = core.get_scoped_config().get("endpoint_url")
            if endpoint and not os.environ.keys() & ENDPOINTS:
                options["endpoint"] = endpoint
        except (BotoCoreError, ValueError) as error:
            remedy = f"set {' and '.join(KEYS)}, or check ~/.aws and AWS_ENDPOINT_URL"
            raise ConfigError(f"{place} needs credentials: {one_line(error)}; {remedy}") from error
    return S3Store(form[1], prefix=(form[2] or "").strip("/"), **options)
