"""`motley serve`: the HTTP server. Two processes:

    front                        HTTP, JSON, templates, tokenizing, tool calls; imports no torch
       │ ▲  one message a step each way (wire)
       ▼ │
    engine_process               the model: `motley.LLM` and its steps

settings         flags as one object
wire             frames of JSON over a socket
engine_process   the engine's side: requests in, the pieces of each step out
collector        collects the pieces of all requests into one message a step
engine_client    the front's side: jobs, mailboxes, calls; starts the process and starts it again
jobs             the internal request type, and what comes back
model            what the front knows of the model: tokenizer, chat template, metadata
sampling         fields of a request → SamplingParams, and back as llama-server's `generation_settings`
prompts          prompts in all the forms that clients send
chat             messages → prompt
parts            answers in pieces: reasoning, content, tool calls
http             connections: limits on the heads of requests
security         keys, Host, CORS, limits
replies          JSON replies; a client that leaves cancels its jobs
streams          server-sent events, written as the engine's messages come in
errors           errors as clients expect them
metrics, slots   what /metrics and /slots show
api/             one file for each API
front            the ASGI application
supervisor       starts and ends both processes: signals, exit codes
"""
