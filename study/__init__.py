"""The study: methods, granularities and number formats compared on real models, and the pages generated from the results.

`data` downloads texts and tasks, `cases` lists what is quantized, `run` measures it into a result file, `page` and `plot`
generate the tables and plots of docs/study.md and docs/quantize.md.
"""
