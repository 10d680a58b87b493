// Asks the dashboard on this machine, with the token from the page's address.

const token = new URLSearchParams(location.search).get("token") || "";

// The answer's object. Throws an Error with the dashboard's message, or the browser's if there is no connection.
export async function ask(path, parameters = {}) {
  const query = new URLSearchParams({ ...parameters, token });
  const answer = await fetch(`${path}?${query}`, { cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()).trim().replace(/^400 Bad Request: /, "") || `status ${answer.status}`);
  return answer.json();
}
