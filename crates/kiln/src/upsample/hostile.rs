//! Chat services that are broken or hostile: every answer ends in time, in bounded memory, with words that tell what is
//! wrong, and without the key.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::chat::{ChatService, Problem};

const KEY: &str = "sk-a-secret-key";
/// How long a service may take in these tests.
const TIMEOUT: Duration = Duration::from_millis(600);

/// A service with a key, which answers nothing.
fn silent() -> ChatService {
    ChatService::with_key("http://localhost", None, Some(KEY.into()), TIMEOUT).unwrap()
}

/// Asks a service that answers with `answer`.
fn ask(
    answer: impl FnOnce(&mut TcpStream) -> std::io::Result<()> + Send + 'static,
) -> Result<String, Problem> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 4096];
        let _ = stream.read(&mut request);
        // The client may hang up.
        let _ = answer(&mut stream);
    });
    let service = ChatService::with_key(&url, None, Some(KEY.into()), TIMEOUT).unwrap();
    let begin = Instant::now();
    let answer = service.ask("{}".into(), &mut || true).unwrap();
    assert!(begin.elapsed() < Duration::from_secs(10));
    answer.and_then(|(status, answer)| service.text(status, &answer))
}

/// Asks a service that answers with these bytes.
fn ask_for(status: &str, body: &[u8]) -> Result<String, Problem> {
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len())
        .into_bytes();
    let answer = [&head, body].concat();
    ask(move |stream| stream.write_all(&answer))
}

#[track_caller]
fn assert_fails(answer: Result<String, Problem>, words: &str) {
    let problem = answer.unwrap_err();
    assert!(problem.what.contains(words) && !problem.hint.is_empty(), "{}", problem.what);
    assert!(!problem.what.contains("secret") && problem.what.len() < 1000, "{}", problem.what);
}

#[test]
fn an_answer_without_an_end_is_cut_off() {
    const ENDLESS: &[u8] = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n";
    assert_fails(
        ask(|stream| {
            stream.write_all(ENDLESS)?;
            let zeros = [b'0'; 65536];
            (0..10_000).try_for_each(|_| stream.write_all(&zeros))
        }),
        "an answer of more than 1 MiB",
    );
    // Announced, but not sent.
    assert_fails(
        ask(|stream| {
            stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n{")?;
            std::thread::sleep(2 * TIMEOUT);
            Ok(())
        }),
        "",
    );
    // Headers without an end.
    assert_fails(
        ask(|stream| {
            stream.write_all(b"HTTP/1.1 200 OK\r\n")?;
            (0..100_000).try_for_each(|_| stream.write_all(b"X-Header: many\r\n"))
        }),
        "",
    );
}

#[test]
fn a_service_that_sends_byte_by_byte_is_stopped_in_time() {
    for head in ["", "HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n"] {
        let drip = move |stream: &mut TcpStream| {
            stream.write_all(head.as_bytes())?;
            for byte in b"HTTP/1.1 200 OK\r\nX: ".iter().chain(&[b' '; 4000]) {
                stream.write_all(&[*byte])?;
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(ErrorKind::Other.into())
        };
        assert_fails(ask(drip), "no whole answer in time");
    }
}

#[test]
fn answers_that_are_no_chat_are_told() {
    let deep = "[".repeat(100_000);
    // Gzip, which was not asked for, is not unpacked.
    let gzip = [&[0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3][..], &[0; 5000]].concat();
    let cases: [(&[u8], &str); 15] = [
        (b"", "an invalid answer"),
        (b"<html><script>alert(1)</script></html>", "an invalid answer"),
        (b"\xff\xfe\x00", "an invalid answer"),
        (b"{\"choices\": [{\"message\": {\"content\": \"\xff\"}}]}", "an invalid answer"),
        (b"{\"choices\": [{\"message\"", "an invalid answer"),
        (deep.as_bytes(), "recursion limit"),
        (&gzip, "an invalid answer"),
        (b"null", "without a text"),
        (b"[]", "without a text"),
        (b"\"sk-a-secret-key\"", "without a text"),
        (b"{\"choices\": []}", "without a text"),
        (b"{\"choices\": {\"0\": 1}}", "without a text"),
        (b"{\"choices\": [{\"message\": {\"content\": 7}}]}", "without a text"),
        (b"{\"choices\": [{\"message\": {\"content\": \" \"}}]}", "without a text"),
        (b"{\"choices\": [{\"message\": {\"content\": [\"a cat\"]}}]}", "without a text"),
    ];
    cases.into_iter().for_each(|(body, words)| assert_fails(silent().text(200, body), words));
    assert_fails(ask_for("200 OK", &gzip), "an invalid answer");
    assert_fails(ask(|stream| stream.write_all(b"SSH-2.0-OpenSSH\r\n\r\n")), "");
    assert_fails(ask(|_| Ok(())), "");
}

#[test]
fn only_a_prompt_is_taken_from_an_answer() {
    let chat = |message: Value| {
        silent().text(200, json!({ "choices": [{ "message": message }] }).to_string().as_bytes())
    };
    assert_eq!(chat(json!({ "content": " a cat\n" })).unwrap(), "a cat");
    assert_fails(chat(json!({ "content": null, "refusal": "I can't" })), "it refuses: I can't");
    assert_fails(chat(json!({ "content": null, "refusal": KEY })), "it refuses: …");
    assert_fails(chat(json!({ "content": "x".repeat(20_000) })), "too long for a prompt");
    assert_fails(chat(json!({ "content": format!("a cat {KEY}") })), "with the service's key in it");
}

#[test]
fn the_key_is_never_told() {
    for body in [
        format!("{{\"error\": {{\"message\": \"Bearer {KEY} is wrong\"}}}}"),
        format!("<h1>500</h1> Authorization: Bearer {KEY}"),
        // Cut in the middle of the key.
        format!("{}{KEY}", "x".repeat(195)),
    ] {
        assert_fails(ask_for("500 Oops", body.as_bytes()), "status 500: ");
    }
}

#[test]
fn redirects_are_told_and_not_followed() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    other.set_nonblocking(true).unwrap();
    let status = format!("307 Moved\r\nLocation: http://{}/v1", other.local_addr().unwrap());
    let problem = ask_for(&status, b"").unwrap_err();
    assert!(problem.what.contains("status 307") && problem.hint.contains("redirects are not followed"));
    assert_eq!(other.accept().unwrap_err().kind(), ErrorKind::WouldBlock, "nobody asked there");
}

#[test]
fn a_service_that_does_not_answer_can_be_stopped() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let service = ChatService::new(&url, None).unwrap();
    let mut asked = 0;
    let stopped = service.ask("{}".into(), &mut || {
        asked += 1;
        asked < 3
    });
    assert_eq!(stopped.unwrap_err().message, "cancelled");
}

#[test]
fn reasons_are_short_and_plain() {
    let reason = |body: &[u8]| silent().text(418, body).unwrap_err().what;
    assert_eq!(reason(br#"{"error": {"message": "no such model"}}"#), "status 418: no such model");
    assert_eq!(reason(br#"{"error": "busy"}"#), "status 418: busy");
    assert_eq!((reason(b"a\x1b[31m\nb"), reason(b"")), ("status 418: a[31mb".into(), "status 418".into()));
    assert!(reason(&[b'x'; 5000]).len() < 230);
}
