//! Time stamps of an authority, and of what is none. That validators accept them, `tools/credentials/check.py` checks.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use kiln_credentials::{NewCredentials, Result, Signer, sign};
use kiln_image::{Format, read_manifest_store};

use crate::tsa::{Tsa, serve};
use crate::{contains, file, statement};

fn signer() -> Signer {
    let folder = tempfile::tempdir().unwrap();
    let files = NewCredentials::in_folder(folder.path());
    files.create("Ada").unwrap();
    Signer::open(&files.key, &files.certificate).unwrap()
}

fn signed(signer: &Signer) -> Result<Vec<u8>> {
    let signed = sign(&file(), Format::Png, &statement(), signer)?;
    Ok(read_manifest_store(&signed)?.unwrap())
}

#[test]
fn a_signature_gets_the_time_stamp_of_the_authority() {
    let (tsa, count) = (Tsa::new(), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&count);
    let url = serve(move |_, request| {
        counted.fetch_add(1, SeqCst);
        ("200 OK", tsa.answer(request))
    });
    let signer = signer().with_time_stamps(&url).unwrap();
    assert_eq!(count.load(SeqCst), 1);
    let lengths = [(); 3].map(|()| {
        let store = signed(&signer).unwrap();
        assert!(contains(&store, b"sigTst2") && contains(&store, b"tstTokens") && contains(&store, b"Clock"));
        store.len()
    });
    // Signatures of the authority differ in length, files do not.
    assert_eq!(lengths, [lengths[0]; 3]);
    assert_eq!(count.load(SeqCst), 4, "one request a file");
    assert!(!contains(&signed(&self::signer()).unwrap(), b"sigTst2"));
}

#[test]
fn answers_that_are_no_time_stamp_are_refused() {
    let (tsa, query) = (Tsa::new(), query());
    let earlier = tsa.answer(&query);
    // The hash starts behind the heads of the message, its version, the imprint, and the algorithm.
    let mut other = query;
    other[25] ^= 1;
    let other = tsa.answer(&other);
    // Status 2 with the text "too busy".
    let refusal = b"\x30\x11\x30\x0f\x02\x01\x02\x30\x0a\x0c\x08too busy".to_vec();
    let of_a_set = [&[0x31], &earlier[1..]].concat();
    for (status, body, problem) in [
        ("200 OK", refusal, "refused with status 2: too busy"),
        ("200 OK", b"\x30\x05\x30\x03\x02\x01\x00".to_vec(), "has no token"),
        ("200 OK", other, "is of something else"),
        ("200 OK", earlier[..earlier.len() - 1].to_vec(), "is no time stamp"),
        ("200 OK", earlier.clone(), "to another request"),
        ("200 OK", of_a_set, "is no time stamp"),
        ("200 OK", b"<html>".to_vec(), "is no time stamp"),
        ("200 OK", Vec::new(), "is no time stamp"),
        ("200 OK", vec![0x30; 70_000], "limit: 65536"),
        ("302 Found\r\nLocation: http://127.0.0.1:1/", Vec::new(), "status 302"),
        ("500 Internal Server Error", earlier, "status 500"),
    ] {
        let url = serve(move |_, _| (status, body.clone()));
        let error = signer().with_time_stamps(&url).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains(problem) && error.to_string().contains(&url), "{error}");
        assert!(error.advice().is_some());
    }
}

/// The request that is made first, to the number of this time.
fn query() -> Vec<u8> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let url = serve(move |_, request| {
        sender.send(request.to_vec()).unwrap();
        ("500 Internal Server Error", Vec::new())
    });
    assert!(signer().with_time_stamps(&url).is_err());
    receiver.recv().unwrap()
}

#[test]
fn an_answer_that_is_longer_than_those_before_gets_its_room() {
    let tsa = Tsa::new();
    let url = serve(move |number, request| {
        let mut answer = tsa.answer(request);
        if number > 0 {
            answer = with_longer_policy(&answer);
        }
        ("200 OK", answer)
    });
    let signer = signer().with_time_stamps(&url).unwrap();
    let store = signed(&signer).unwrap();
    assert!(contains(&store, &[0x55; 300]));
}

/// Adds an element of 300 bytes at the end of the token. Nobody reads it.
fn with_longer_policy(answer: &[u8]) -> Vec<u8> {
    let more = [&[0x04, 0x82, 0x01, 0x2c][..], &[0x55; 300]].concat();
    let mut answer = [answer, &more].concat();
    // The lengths of the answer and of the token behind its status.
    for at in [2, 11] {
        let length = u16::from_be_bytes([answer[at], answer[at + 1]]) + more.len() as u16;
        answer[at..at + 2].copy_from_slice(&length.to_be_bytes());
    }
    answer
}

#[test]
fn a_failure_of_the_network_is_tried_again() {
    let tsa = Tsa::new();
    let url = serve(move |number, request| match number {
        1 => ("503 Service Unavailable", Vec::new()),
        _ => ("200 OK", tsa.answer(request)),
    });
    let signer = signer().with_time_stamps(&url).unwrap();
    assert!(contains(&signed(&signer).unwrap(), b"sigTst2"));
}

#[test]
fn addresses_that_are_none_are_refused() {
    for (url, problem) in [
        ("timestamp.example", "not an http:// or https:// URL"),
        ("ftp://host/x", "not an http:// or https:// URL"),
        ("http://user:pass@host/", "user name"),
        ("http://", "URL"),
        ("http://127.0.0.1:1/", "no time stamp from `http://127.0.0.1:1/`"),
    ] {
        let error = signer().with_time_stamps(url).map(|_| ()).unwrap_err();
        assert!(error.to_string().contains(problem), "{error}");
    }
}
