"""Whether the Hugging Face hub can be reached, which its own client takes half a minute to say."""

from __future__ import annotations

import http.client
import os
import ssl
import urllib.error
import urllib.request


def why_not_hub(timeout: float = 5.0) -> str | None:
    """Why the hub cannot be reached; None: it answers, in whatever words, or nobody is to ask it.

    HF_ENDPOINT and the usual variables for proxies count, as they do for the hub's own client.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return None  # the client takes what it has in its cache, and says at once what it lacks
    url = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout).close()
    except (urllib.error.HTTPError, http.client.HTTPException, ValueError):
        return None  # it answered; and the client has better words for a wrong HF_ENDPOINT
    except OSError as e:
        reason = getattr(e, "reason", e)
        if isinstance(reason, ssl.SSLError):
            return None  # the hub's client brings certificates of its own
        return f"no connection to {url}: {reason}"
    return None
