//! Checks by small shell scripts and by a local HTTP server: every way to answer, and not to.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::{Duration, Instant};

use kiln_filters::{ImageCheck, Refusal};
use kiln_image::RgbImage;

fn image() -> RgbImage {
    RgbImage::new(64, 48, (0..64 * 48 * 3).map(|i| (i % 251) as u8).collect()).unwrap()
}

const TIMEOUT: Duration = Duration::from_secs(20);

fn run(check: &ImageCheck, prompt: &str) -> Result<(), Refusal> {
    check.check(&image(), prompt, &|| false)
}

fn refused(reason: &str) -> Result<(), Refusal> {
    Err(Refusal::Refused(Some(reason.into())))
}

#[track_caller]
fn assert_failed(result: Result<(), Refusal>, word: &str) {
    match result {
        Err(Refusal::Failed(detail)) => assert!(detail.contains(word), "{detail}"),
        other => panic!("{other:?}"),
    }
}

/// A check by a shell script.
#[cfg(unix)]
fn script(text: &str, timeout: Duration) -> (tempfile::TempDir, ImageCheck) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a check.sh");
    std::fs::write(&path, text).unwrap();
    let check = ImageCheck::new(&format!("sh '{}'", path.display()), timeout).unwrap();
    (folder, check)
}

#[cfg(unix)]
#[test]
fn the_exit_status_accepts_or_refuses() {
    for (text, expected) in [
        ("exit 0", Ok(())),
        ("echo fine; exit 0", Ok(())),
        ("echo 'too red (0.9)'; echo more; exit 1", refused("too red (0.9)")),
        ("exit 1", Err(Refusal::Refused(None))),
        ("cat > /dev/null; exit 1", Err(Refusal::Refused(None))),
    ] {
        let (_folder, check) = script(text, TIMEOUT);
        assert_eq!(run(&check, "a fox"), expected, "{text}");
    }
}

/// What the scripts of a Unix shell test elsewhere, as far as a batch file can.
#[cfg(windows)]
#[test]
fn a_batch_file_accepts_refuses_and_is_ended_with_what_it_started() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a check.bat");
    let lines = [
        "@echo off",
        "if \"%KILN_PROMPT%\"==\"good\" exit /b 0",
        "if \"%KILN_PROMPT%\"==\"bad\" (echo too red& exit /b 1)",
        "if \"%KILN_PROMPT%\"==\"crash\" (echo loading failed 1>&2& exit /b 7)",
        "ping -n 600 127.0.0.1 > nul",
    ];
    std::fs::write(&path, lines.join("\r\n")).unwrap();
    let check = |timeout| ImageCheck::new(&format!("'{}'", path.display()), timeout).unwrap();
    assert_eq!(run(&check(TIMEOUT), "good"), Ok(()));
    assert_eq!(run(&check(TIMEOUT), "bad"), refused("too red"));
    assert_failed(run(&check(TIMEOUT), "crash"), "loading failed");
    let begin = Instant::now();
    assert_failed(run(&check(Duration::from_secs(2)), "hang"), "2 s");
    assert!(begin.elapsed() < Duration::from_secs(10), "the pipes are open as long as a process has them");
}

#[cfg(unix)]
#[test]
fn the_program_gets_the_image_and_the_prompt() {
    let (folder, check) = script(
        "cat > \"$(dirname \"$0\")/image\"; printf %s \"$KILN_PROMPT\" > \"$(dirname \"$0\")/prompt\"; echo \"$#\"; exit 1",
        TIMEOUT,
    );
    let prompt = "a $(touch pwned) `id` ; rm -rf \"x\" 'y' 狐\nsecond line\0end";
    assert_eq!(run(&check, prompt), refused("0"));
    let seen = |name: &str| std::fs::read(folder.path().join(name)).unwrap();
    assert_eq!(kiln_image::from_bytes("image", &seen("image")).unwrap(), image());
    assert_eq!(String::from_utf8(seen("prompt")).unwrap(), prompt.replace('\0', " "));
    assert!(!folder.path().join("pwned").exists());
}

#[cfg(unix)]
#[test]
fn a_long_prompt_is_in_a_file() {
    let (folder, check) = script(
        "echo \"${KILN_PROMPT-unset} $(wc -c < \"$KILN_PROMPT_FILE\")\"; printf %s \"$KILN_PROMPT_FILE\" > \"$(dirname \"$0\")/name\"; exit 1",
        TIMEOUT,
    );
    for length in [32_001, 200_000, 1 << 20] {
        assert_eq!(run(&check, &"x".repeat(length)), refused(&format!("unset {length}")));
        let name = std::fs::read_to_string(folder.path().join("name")).unwrap();
        assert!(!std::path::Path::new(&name).exists(), "removed with the check");
    }
    let (_folder, check) =
        script("test -z \"${KILN_PROMPT_FILE+set}\" && echo \"${#KILN_PROMPT}\"; exit 1", TIMEOUT);
    assert_eq!(run(&check, &"x".repeat(32_000)), refused("32000"));
}

#[cfg(unix)]
#[test]
fn a_program_that_fails_refuses() {
    for (text, word) in [
        ("echo loading failed >&2; exit 7", "loading failed"),
        ("exit 255", "255"),
        ("kill -9 $$", "signal"),
        ("kill -SEGV $$", "signal"),
    ] {
        let (_folder, check) = script(text, TIMEOUT);
        assert_failed(run(&check, ""), word);
    }
    // A program that vanished after the start.
    let (folder, check) = script("exit 0", TIMEOUT);
    drop(folder);
    assert!(run(&check, "").is_err());
}

#[cfg(unix)]
#[test]
fn a_program_that_hangs_is_killed_with_what_it_started() {
    let (folder, check) = script(
        "(sleep 600; touch \"$(dirname \"$0\")/late\") & echo $! > \"$(dirname \"$0\")/pid\"; sleep 600",
        Duration::from_millis(700),
    );
    let begin = Instant::now();
    assert_failed(run(&check, ""), "0.7 s");
    assert!(begin.elapsed() < Duration::from_secs(10));
    let pid = std::fs::read_to_string(folder.path().join("pid")).unwrap();
    let gone =
        |_: &u32| !std::path::Path::new(&format!("/proc/{}", pid.trim())).exists() || zombie(pid.trim());
    assert!((0..200).inspect(|_| std::thread::sleep(Duration::from_millis(10))).any(|i| gone(&i)), "{pid}");
}

#[cfg(unix)]
fn zombie(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z "))
}

#[cfg(unix)]
#[test]
fn a_background_process_does_not_delay_the_answer() {
    let (_folder, check) = script("sleep 600 & exit 0", TIMEOUT);
    let begin = Instant::now();
    assert_eq!(run(&check, ""), Ok(()));
    assert!(begin.elapsed() < Duration::from_secs(10));
}

#[cfg(unix)]
#[test]
fn a_program_that_floods_its_output_is_stopped() {
    let begin = Instant::now();
    let (_folder, check) = script("yes", TIMEOUT);
    assert_failed(run(&check, ""), "65536");
    // Even if it ends before that is noticed.
    let (_folder, check) = script("head -c 66000 /dev/zero; exit 0", TIMEOUT);
    assert_failed(run(&check, ""), "65536");
    // Errors are read and dropped.
    let (_folder, check) = script("yes | head -c 30000000 >&2; echo no; exit 1", TIMEOUT);
    assert_eq!(run(&check, ""), refused("no"));
    assert!(begin.elapsed() < Duration::from_secs(15));
}

#[cfg(unix)]
#[test]
fn a_check_can_be_cancelled() {
    let (_folder, check) = script("sleep 600", TIMEOUT);
    let begin = Instant::now();
    let result = check.check(&image(), "", &|| begin.elapsed() > Duration::from_millis(200));
    assert_eq!(result, Err(Refusal::Cancelled));
    assert!(begin.elapsed() < Duration::from_secs(10));
}

#[cfg(unix)]
#[test]
fn several_checks_run_at_once() {
    let (_folder, check) =
        script("sleep 0.3; test \"$KILN_PROMPT\" = good || { echo \"$KILN_PROMPT\"; exit 1; }", TIMEOUT);
    std::thread::scope(|scope| {
        let threads: Vec<_> = ["good", "bad", "good", "worse"]
            .map(|prompt| scope.spawn(|| run(&check, prompt)))
            .into_iter()
            .collect();
        let results: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!(results, [Ok(()), refused("bad"), Ok(()), refused("worse")]);
    });
}

#[test]
fn options_that_name_no_check_are_refused() {
    for (option, word) in [
        ("", "empty"),
        ("   ", "empty"),
        ("''", "empty"),
        ("'unclosed", "quote"),
        ("no-such-program-anywhere --x", "not found"),
        ("./no/such/file", "not found"),
        ("ftp://host/x", "http://"),
        ("http://", "URL"),
        ("http://user:pass@host/", "user name"),
    ] {
        let error = ImageCheck::new(option, TIMEOUT).unwrap_err();
        assert!(error.what.contains(word) && !error.hint.is_empty(), "{option}: {error}");
    }
}

/// A server that answers one request after another with these responses; `None` never answers. Returns its address and
/// the requests.
fn serve(responses: Vec<Option<Vec<u8>>>) -> (String, std::sync::mpsc::Receiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/check?model=1", listener.local_addr().unwrap());
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut held = Vec::new();
        for response in responses {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            let mut buffer = [0; 4096];
            // The body ends with the closing boundary.
            while !request.ends_with(b"--\r\n") {
                match stream.read(&mut buffer) {
                    Ok(n @ 1..) => request.extend_from_slice(&buffer[..n]),
                    _ => break,
                }
            }
            let _ = sender.send(request);
            match response {
                Some(response) => drop(stream.write_all(&response)),
                None => held.push(stream),
            }
        }
        std::thread::sleep(Duration::from_secs(30));
    });
    (url, receiver)
}

fn response(status: &str, body: &str) -> Option<Vec<u8>> {
    let length = body.len();
    Some(
        format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}")
            .into_bytes(),
    )
}

#[test]
fn a_service_accepts_or_refuses() {
    let (url, requests) = serve(vec![
        response("200 OK", r#"{"allow": true}"#),
        response("200 OK", r#"{"allow": false, "reason": "a \u001bthing", "score": 0.9}"#),
        response("200 OK", r#"{"allow": false}"#),
        response("200 OK", r#"{"allow": false, "reason": null}"#),
    ]);
    let check = ImageCheck::new(&url, TIMEOUT).unwrap();
    assert_eq!(run(&check, "a fox, 狐"), Ok(()));
    let request = requests.recv().unwrap();
    let text = String::from_utf8_lossy(&request);
    assert!(text.starts_with("POST /check?model=1 HTTP/1.1\r\n"), "{text}");
    assert!(text.contains("name=\"prompt\"") && text.contains("\r\n\r\na fox, 狐\r\n--kiln-"), "{text}");
    let at = request.windows(8).position(|bytes| bytes == b"\x89PNG\r\n\x1a\n").unwrap();
    let end = request[at..].windows(9).position(|bytes| bytes == b"\r\n--kiln-").unwrap();
    assert_eq!(kiln_image::from_bytes("image", &request[at..at + end]).unwrap(), image());
    match run(&check, "") {
        Err(Refusal::Refused(Some(reason))) => {
            assert!(reason.contains("thing") && !reason.contains('\u{1b}'))
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(run(&check, ""), Err(Refusal::Refused(None)));
    assert_eq!(run(&check, ""), Err(Refusal::Refused(None)));
}

#[test]
fn a_service_without_a_valid_answer_refuses() {
    let long = format!(r#"{{"allow": true, "more": "{}"}}"#, "x".repeat(70_000));
    let cases = [
        (response("200 OK", "yes"), "not valid"),
        (response("200 OK", ""), "not valid"),
        (response("200 OK", "{}"), "not valid"),
        (response("200 OK", r#"{"allow": "true"}"#), "not valid"),
        (response("200 OK", r#"{"allow": 1}"#), "not valid"),
        (response("200 OK", "true"), "not valid"),
        (response("500 Oops", r#"{"allow": true}"#), "500"),
        (response("204 No Content", ""), "204"),
        (response("302 Found\r\nLocation: http://127.0.0.1:1/", r#"{"allow": true}"#), "302"),
        (response("200 OK", &long), ""),
        (Some(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{\"allow\"".to_vec()), ""),
        (Some(b"nonsense\r\n\r\n".to_vec()), ""),
        (Some(Vec::new()), ""),
    ];
    let (responses, words): (Vec<_>, Vec<_>) = cases.into_iter().unzip();
    let (url, _requests) = serve(responses);
    let check = ImageCheck::new(&url, TIMEOUT).unwrap();
    words.into_iter().for_each(|word| assert_failed(run(&check, ""), word));
}

#[test]
fn a_service_that_is_slow_or_absent_refuses() {
    let (url, _requests) = serve(vec![None, None]);
    let begin = Instant::now();
    let check = ImageCheck::new(&url, Duration::from_millis(500)).unwrap();
    assert!(matches!(run(&check, ""), Err(Refusal::Failed(_))));
    let check = ImageCheck::new(&url, TIMEOUT).unwrap();
    let cancelled = check.check(&image(), "", &|| begin.elapsed() > Duration::from_secs(1));
    assert_eq!(cancelled, Err(Refusal::Cancelled));
    assert!(begin.elapsed() < Duration::from_secs(10));
    // A port that nobody listens on.
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let check = ImageCheck::new(&format!("http://{free}/"), TIMEOUT).unwrap();
    assert!(matches!(run(&check, ""), Err(Refusal::Failed(_))));
}
