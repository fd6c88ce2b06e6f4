// The server's API as the page needs it. Addresses are relative, so the page also works below a path of a proxy.

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function failure(response) {
  let message = `The server answered ${response.status}.`;
  try {
    const body = await response.json();
    message = body.error?.message ?? message;
  } catch {
    // No JSON: the status has to do.
  }
  const wait = Number(response.headers.get("retry-after"));
  if (response.status === 429 && wait > 0) {
    message += ` Try again in ${wait} s.`;
  }
  return new ApiError(message, response.status);
}

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") {
      throw error;
    }
    throw new ApiError("The server can’t be reached.", 0);
  }
  if (!response.ok) {
    throw await failure(response);
  }
  return response;
}

/** The models' records: names, context lengths, default sampling. */
export async function fetchModels(key) {
  const response = await request("v1/models", { headers: headers(key) });
  const listed = (await response.json()).data ?? [];
  const models = listed.filter(({ id, root }) => !root || root === id); // a model may have further names
  if (!models.length) {
    throw new ApiError("The server has no model.", 404);
  }
  return models;
}

/** True if the weights are loaded. */
export async function isReady() {
  try {
    return (await fetch("ready", { cache: "no-store" })).ok;
  } catch {
    return false;
  }
}

/** Chunks of a streamed answer. Ends without an error only where the server said that it is whole. */
export async function* streamChat(body, key, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(key) },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      return;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) {
      throw new ApiError(chunk.error.message ?? "The server failed.", 500);
    }
    yield chunk;
  }
  throw new ApiError("The connection broke before the answer was complete.", 0);
}

/** Yields the data of server-sent events; the bytes may be cut anywhere. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) {
        return;
      }
      const lines = (held + value).split(/\r?\n/);
      held = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) {
          yield line.slice(5).trim();
        }
      }
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError("The connection broke before the answer was complete.", 0);
  } finally {
    reader.cancel().catch(() => {});
  }
}
