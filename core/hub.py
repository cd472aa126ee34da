"""A quick check of the connection to the Hugging Face hub; its own client takes half a minute."""

from __future__ import annotations

import http.client
import os
import ssl
import urllib.error
import urllib.request


def why_not_hub(timeout: float = 5.0) -> str | None:
    """The reason why the hub cannot be reached, or None. Reads HF_ENDPOINT and proxy variables."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return None  # the client uses its cache, and reports what is missing
    url = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout).close()
    except (urllib.error.HTTPError, http.client.HTTPException, ValueError):
        return None  # it answered, or the client has a better message for a wrong HF_ENDPOINT
    except OSError as e:
        reason = getattr(e, "reason", e)
        if not isinstance(reason, ssl.SSLError):  # the hub's client has its own certificates
            return f"no connection to {url}: {reason}"
    return None
