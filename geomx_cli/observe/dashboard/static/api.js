// Asks the dashboard on this machine, with the token from the page's address.

const LIMIT = 30_000;  // a search of logs takes 20 s at most
const token = new URLSearchParams(location.search).get("token") || "";

// The answer's object. Throws an Error with the dashboard's message, or the browser's if there is no connection or answer.
export async function ask(path, parameters = {}) {
  const query = new URLSearchParams({ ...parameters, token });
  const answer = await fetch(`${path}?${query}`, { cache: "no-store", signal: AbortSignal.timeout(LIMIT) });
  if (!answer.ok) throw new Error((await answer.text()).trim().replace(/^400 Bad Request: /, "") || `status ${answer.status}`);
  return answer.json();
}
