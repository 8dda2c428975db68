"""The study: methods, granularities and number formats side by side on a real model, and the page that says what came out.

`data` brings the texts and tasks, `cases` lists what is quantized, `run` measures it into a result file, `page` and `plot` turn
result files into the generated parts of docs/internals/study.md and docs/internals/quantization.md.
"""
