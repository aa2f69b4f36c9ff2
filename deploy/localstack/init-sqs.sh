#!/usr/bin/env bash
# Creates relay-transactions and its dead-letter queue. LocalStack runs it after each start (it loses its queues
# when it stops); Baton checks their settings at its own start. Running it again changes nothing;
# a queue of that name with other settings is an error.
set -euo pipefail

# Not AWS_REGION: LocalStack sets it to us-east-1 for its init scripts, regardless of the container's environment.
region=${QUEUE_REGION:-ap-northeast-2}
queue=relay-transactions
dead_letters=relay-transactions-dlq
visibility_s=60
retention_s=345600 # 4 days
long_poll_s=20
receives_max=3

sqs() { awslocal --region "$region" --output text sqs "$@"; }

# The dead-letter queue first: the redrive policy names it.
dead_letters_url=$(sqs create-queue --queue-name "$dead_letters" --query QueueUrl \
  --attributes "MessageRetentionPeriod=$retention_s,ReceiveMessageWaitTimeSeconds=$long_poll_s")
dead_letters_arn=$(sqs get-queue-attributes --queue-url "$dead_letters_url" \
  --attribute-names QueueArn --query Attributes.QueueArn)

# SQS expects the policy as JSON inside a JSON string.
policy="{\\\"deadLetterTargetArn\\\":\\\"$dead_letters_arn\\\",\\\"maxReceiveCount\\\":\\\"$receives_max\\\"}"
attributes="{\"VisibilityTimeout\":\"$visibility_s\",\"MessageRetentionPeriod\":\"$retention_s\","
attributes+="\"ReceiveMessageWaitTimeSeconds\":\"$long_poll_s\",\"RedrivePolicy\":\"$policy\"}"
queue_url=$(sqs create-queue --queue-name "$queue" --query QueueUrl --attributes "$attributes")

echo "queues are ready in $region: $queue_url, after $receives_max receives $dead_letters_url"
