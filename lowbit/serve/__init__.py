"""`lowbit serve`: OpenAI's API over HTTP, a thin layer between connections and the engine.

server.py      the process: socket, warm-up, signals            worker.py     the thread that steps the engine
app.py         the routes                                       service.py    state shared by the routes
schema.py      bodies of requests, field by field               chat.py       prompts as tokens, chat templates
job.py         a request as sequences of the engine             prompts.py    prompts as tokens, by a separate process
tools.py       formats of tool calls and reasoning              answer.py     the parts of an answer, read as it grows
texts.py       embeddings, texts as tokens
prompt_process.py  that process: templates and tokenizer, with a deadline and a limit of memory
stream.py      sending responses, detecting disconnects         responses.py  responses and chunks in OpenAI's form
errors.py      errors in OpenAI's form                          metrics.py    Prometheus metrics
limits.py      upper limits of everything                       listener.py   accepting a bounded number of connections
connection.py  time limits of a connection                      page.py       the page at /
client.py      the client side, for `lowbit chat`

FastAPI, uvicorn and prometheus-client come with the extra `serve`. `import lowbit.serve` needs none of them, its modules do.
"""
