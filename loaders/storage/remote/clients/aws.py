"""What AWS tools find by themselves: credentials, region and endpoint of a profile; boto3 reads them.

obstore finds credentials in the environment and on machines of AWS. It reads no profiles, and takes a session token of
the environment for keys that were given.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from orchdata.loaders.environment import way_out
from orchdata.loaders.errors import PackageError

_KEYS: Final[tuple[str, ...]] = ("access_key_id", "secret_access_key", "session_token", "token")
_OTHER_CREDENTIALS: Final = {"skip_signature", "role_arn", "web_identity_token_file", "credential_provider"}
_OF_ENVIRONMENT: Final = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
_FILES: Final = (("SHARED_CREDENTIALS", "credentials"), ("CONFIG", "config"))


def with_aws_settings(config: Mapping[str, Any], profile: str | None) -> dict[str, Any]:
    """Return the settings of a store of S3, with what a profile of AWS adds to them.

    Args:
        config: settings that were given; these count first, then the environment.
        profile: name of a profile; None: AWS_PROFILE, or the default one.

    Raises:
        ValueError: there is no such profile.
        PackageError: a profile is needed, and boto3 is missing or broken.
    """
    settings = dict(config)
    given = {name.lower().removeprefix("aws_"): name for name in settings}
    if {"access_key_id", "secret_access_key"} <= given.keys():
        keys = {each: settings.pop(given[each]) for each in _KEYS if each in given}
        # Without a session token of the environment, which is of other keys.
        settings["credential_provider"] = lambda: {
            "access_key_id": keys["access_key_id"],
            "secret_access_key": keys["secret_access_key"],
            "token": keys.get("session_token") or keys.get("token"),
            "expires_at": None,
        }
    has_credentials = bool(given.keys() & (_OTHER_CREDENTIALS | set(_KEYS))) or (
        profile is None and any(map(os.environ.get, _OF_ENVIRONMENT))
    )
    has_endpoint, has_region = given.keys() & {"endpoint", "endpoint_url"}, given.keys() & {"region", "default_region"}
    files = [Path(os.environ.get(f"AWS_{name}_FILE") or f"~/.aws/{file}").expanduser() for name, file in _FILES]
    if (profile is None and not any(file.exists() for file in files)) or (
        has_credentials and has_endpoint and has_region
    ):
        return settings

    try:
        import boto3
        from botocore.configprovider import ConfiguredEndpointProvider
        from botocore.exceptions import ProfileNotFound
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise PackageError("boto3", str(error), way_out("boto3", error), "a profile of AWS") from error
    try:
        session = boto3.Session(profile_name=profile)
    except ProfileNotFound as error:
        raise ValueError(f"AWS has no such profile on this machine: {error}") from None
    if not has_credentials and session.get_credentials() is not None:
        settings["credential_provider"] = Boto3CredentialProvider(session)
    if session.region_name and not has_region:
        settings["region"] = os.environ.get("AWS_REGION") or session.region_name
    if not has_endpoint:  # which may be named for S3 alone
        of_profile = session._session
        provider = ConfiguredEndpointProvider(of_profile.full_config, of_profile.get_scoped_config(), "s3")
        if endpoint := provider.provide():
            settings["endpoint"] = endpoint
    return settings
