"""What a step needs before it is run: memory by tracing, time by a roofline, communication by a network model."""



from leanclip.planning.trace import Kernel, Trace, tracing


