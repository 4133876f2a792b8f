"""What AWS tools find by themselves: credentials, region and endpoint of a profile; boto3 reads them.

obstore finds credentials in the environment and on machines of AWS. It reads no profiles, and takes a session token of
the environment for keys that were given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
    names = {name.lower().removeprefix("aws_"): name for name in settings}
    if "access_key_id" in names and "secret_access_key" in names:
        keys = {each: str(settings.pop(names[each])) for each in _KEYS if each in names}
        settings["credential_provider"] = _static(keys)
    has_credentials = bool(names.keys() & (_OTHER_CREDENTIALS | set(_KEYS))) or (
        profile is None and any(map(os.environ.get, _OF_ENVIRONMENT))
    )
    files = [Path(os.environ.get(f"AWS_{name}_FILE") or f"~/.aws/{file}").expanduser() for name, file in _FILES]
    if profile is None and not any(file.exists() for file in files):
        return settings
    has_place = bool(names.keys() & {"endpoint", "endpoint_url"}) and bool(names.keys() & {"region", "default_region"})
    if has_credentials and has_place:
        return settings
    session = _session(profile)
    if not has_credentials and session.get_credentials() is not None:
        from obstore.auth.boto3 import Boto3CredentialProvider

        settings["credential_provider"] = Boto3CredentialProvider(session)
    if session.region_name and not names.keys() & {"region", "default_region"}:
        settings["region"] = os.environ.get("AWS_REGION") or session.region_name
    if not names.keys() & {"endpoint", "endpoint_url"} and (endpoint := _endpoint(session)):
        settings["endpoint"] = endpoint
    return settings


def _session(profile: str | None) -> Any:
    """Return a session of boto3. Raises ValueError, PackageError."""
    try:
        import boto3
    except ImportError as error:
        raise PackageError("boto3", str(error), way_out("boto3", error), "a profile of AWS") from error
    try:
        return boto3.Session(profile_name=profile)
    except Exception as error:
        if type(error).__name__ != "ProfileNotFound":
            raise
        named = "AWS_PROFILE" if profile is None else f"storage_options profile: {profile!r}"
        raise ValueError(f"{named}: AWS has no such profile on this machine") from None


def _endpoint(session: Any) -> str | None:
    """Return the endpoint of S3 that the environment or the profile names, also for this service alone."""
    from botocore.configprovider import ConfiguredEndpointProvider

    of_profile = session._session
    endpoint: str | None = ConfiguredEndpointProvider(
        full_config=of_profile.full_config, scoped_config=of_profile.get_scoped_config(), client_name="s3"
    ).provide()
    return endpoint


def _static(keys: Mapping[str, str]) -> Callable[[], dict[str, Any]]:
    """Return a provider of keys that were given, without a session token of the environment."""
    token = keys.get("session_token") or keys.get("token")

    def provide() -> dict[str, Any]:
        return {
            "access_key_id": keys["access_key_id"],
            "secret_access_key": keys["secret_access_key"],
            "token": token,
            "expires_at": None,
        }

    return provide
