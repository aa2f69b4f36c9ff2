// Verifies deliveries with the official library. Reads JSON lines {secret, headers, body} and prints for each "accepted"
// or "rejected" and the reason.

const fs = require("fs");
const { Webhook, WebhookVerificationError } = require("standardwebhooks");

const lines = fs.readFileSync(0, "utf8").split("\n");
for (const line of lines.filter((line) => line !== "")) {
  const { secret, headers, body } = JSON.parse(line);
  try {
    new Webhook(secret).verify(body, headers);
    console.log("accepted");
  } catch (error) {
    if (!(error instanceof WebhookVerificationError)) throw error;
    console.log(`rejected: ${error.message}`);
  }
}
