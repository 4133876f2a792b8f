"""Families of Hugging Face models: the real processor and a small random model of each, and what they make of samples.

family.processor() -> HF's own, built in code as the published checkpoint's is set
family.model(processor) -> the real class on a shrunken config, float64
reference(model, processor, samples) -> loss, loss tokens and gradients of HF's own processor and forward
"""
