// The session of a server with API keys: sign in and out.

import { $, memory, openDialog } from "./dom.js";
import { note, trying } from "./notices.js";
import { uploads } from "./upload.js";

/** The longest wait for an answer, in ms: wrong keys are answered late. */
const LIMIT = 60_000;
/** The open key dialog; calls that need the key share it. */
let keyDialog = null;
/** Ends the dialog. */
let signedIn = () => {};
/** Tells the other windows of this browser: the session is theirs, too. */
const windows = new BroadcastChannel("kiln.session");

/** Tries a key; returns what is wrong, or null. */
async function signIn(key) {
  // A header can't hold anything else.
  if (/[^ -~]/.test(key)) return "Wrong API key.";
  let response;
  try {
    response = await fetch("/v1/session", { method: "POST", headers: { authorization: `Bearer ${key}` }, signal: AbortSignal.timeout(LIMIT) });
  } catch (error) {
    return error.name === "TimeoutError" ? "The server does not answer. Try again." : "The server can't be reached. Try again.";
  }
  if (response.ok) return null;
  if (response.status === 401) return "Wrong API key.";
  const answer = await response.json().catch(() => null);
  return answer?.error?.message ?? `${response.status} ${response.statusText}`;
}

/** Asks for the API key, until one is right. */
export function askForKey() {
  keyDialog ??= new Promise((resolve) => {
    const [dialog, form] = [$("key-dialog"), $("key-form")];
    signedIn = () => {
      $("key").value = "";
      dialog.close();
      keyDialog = null;
      resolve();
    };
    let busy = false;
    form.onsubmit = async (event) => {
      event.preventDefault();
      if (busy) return;
      busy = true;
      $("key-submit").textContent = "Signing in…";
      const wrong = await signIn($("key").value);
      busy = false;
      $("key-submit").textContent = "Sign in";
      $("key-wrong").textContent = wrong ?? "";
      if (wrong) return $("key").select();
      showSignOut(true);
      windows.postMessage("signed in");
      signedIn();
    };
    dialog.oncancel = (event) => event.preventDefault();
    $("key-wrong").textContent = "";
    openDialog(dialog);
  });
  return keyDialog;
}

/** Offers to end the session; remembered, because scripts can't see its cookie. */
function showSignOut(on) {
  memory.set("signed-in", on);
  $("sign-out").hidden = !on;
}

/** Ends the session, and asks for the key again. */
async function signOut(call, sure = false) {
  if (uploads() && !sure) return note("Images are still being uploaded. Sign out without them?", "Sign out", () => signOut(call, true));
  await call("/v1/session", { method: "DELETE" });
  showSignOut(false);
  return location.reload();
}

/** `call` calls the server. */
export function listen(call) {
  showSignOut(memory.get("signed-in") === true);
  $("sign-out").onclick = () => trying(() => signOut(call));
  windows.onmessage = () => {
    showSignOut(true);
    if (keyDialog) signedIn();
  };
}
