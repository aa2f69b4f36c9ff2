"""Verifies deliveries with the official library. Reads JSON lines {secret, headers, body} and prints for each "accepted"
or "rejected" and the reason."""

import json
import sys

from standardwebhooks import Webhook, WebhookVerificationError

for line in sys.stdin:
    delivery = json.loads(line)
    try:
        Webhook(delivery["secret"]).verify(delivery["body"], delivery["headers"])
        print("accepted")
    except WebhookVerificationError as error:
        print(f"rejected: {error}")
