"""The study: methods, granularities and number formats compared on real models, and the pages generated from the results.

`data` collects the texts and tasks, `cases` lists what is quantized, `run` measures it into a result file, `page` and `plot`
turn result files into the generated parts of docs/internals/study.md and docs/internals/quantization.md.
"""
