"""Load, quantize if asked, generate: the call and response of DeepSpeed-MII's pipeline over Transformers' generate.

pipe = lowbit.pipeline("path", quantization_mode="wf6af16")
for response in pipe(["DeepSpeed is", "Seattle is"], max_new_tokens=128):
    print(response.generated_text, response.finish_reason)
"""

from lowbit.pipeline.pipeline import Pipeline, pipeline
from lowbit.pipeline.request import FinishReason, GenerateParams, Response, UnknownArgument

__all__ = ["FinishReason", "GenerateParams", "Pipeline", "Response", "UnknownArgument", "pipeline"]
