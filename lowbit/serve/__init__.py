"""`lowbit serve`: texts over HTTP for those who speak OpenAI's API; a thin layer between connections and the engine.

server.py      the process: a socket, warm-up, signals            worker.py   the thread that does the engine's rounds
app.py         the routes                                         service.py  what routes share: model, seats, state
schema.py      what can be asked, field by field                  chat.py     prompts as tokens, templates
job.py         a request as texts for the engine                  prompts.py  prompts as tokens, by a process of its own
prompt_process.py  that process: templates and tokenizer, with a deadline and a limit of memory
answer.py      answers and chunks in OpenAI's form                stream.py   sending them, and noticing who is gone
errors.py      refusals in OpenAI's form                          metrics.py  what Prometheus reads
limits.py      how much of everything                             listener.py  accepting connections, a bounded number
connection.py  how long a connection may take                     page.py     the page at /
client.py      the other side, for `lowbit chat`

FastAPI, uvicorn and prometheus-client come with the extra `serve`; modules here import them, the package does not.
"""
