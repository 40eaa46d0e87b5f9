"""A chat through the OpenAI gateway, streamed. Usage counts accepted drafts as OpenAI counts accepted predictions."""

import argparse

from openai import OpenAI, OpenAIError

QUESTION = "Eva is 5 times as old as Isaac, who is 6. Ivan is 8 years older than Eva. How old are the three together?"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:9000/v1", help="the gateway (serve --openai-port 9000)")
parser.add_argument("--api-key", default="none")
parser.add_argument("--prompt", default=QUESTION)
parser.add_argument("--max-tokens", type=int, default=128)
arguments = parser.parse_args()

client = OpenAI(base_url=arguments.url, api_key=arguments.api_key)
try:
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": arguments.prompt}],
        max_completion_tokens=arguments.max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
except OpenAIError as error:
    raise SystemExit(f"error: {arguments.url}: {error.__cause__ or error}") from None
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    if chunk.usage is not None and (drafts := chunk.usage.completion_tokens_details) is not None:
        accepted, rejected = drafts.accepted_prediction_tokens or 0, drafts.rejected_prediction_tokens or 0
        print(f"\n[{accepted} of {accepted + rejected} drafts accepted]")
