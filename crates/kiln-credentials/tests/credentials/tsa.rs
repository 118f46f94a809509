//! An authority of time stamps (RFC 3161) on this machine, as small as validators accept one. The unit tests
//! and `examples/sign.rs` have it, too.
#![allow(dead_code, reason = "each that includes it uses a part of it")]

use std::io::{Read, Write};
use std::net::TcpListener;

use kiln_base::Utc;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, CustomExtension, DnType, IsCa, KeyPair,
    KeyUsagePurpose, SigningKey,
};
use ring::digest::{SHA256, digest};

/// Object identifiers, encoded.
const SHA_256: &[u8] = &[0x60, 0x86, 0x48, 1, 0x65, 3, 4, 2, 1];
const ECDSA_WITH_SHA_256: &[u8] = &[0x2a, 0x86, 0x48, 0xce, 0x3d, 4, 3, 2];
const SIGNED_DATA: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 7, 2];
const TST_INFO: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 16, 1, 4];
const CONTENT_TYPE: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 3];
const MESSAGE_DIGEST: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 9, 4];
const TIME_STAMPING: &[u8] = &[0x2b, 6, 1, 5, 5, 7, 3, 8];
const EXTENDED_KEY_USAGE: &[u64] = &[2, 5, 29, 37];
const POLICY: &[u8] = &[0x2a, 3, 4, 1];

/// The key of an authority, its certificate and that of the root above it.
pub struct Tsa {
    key: KeyPair,
    certificate: Vec<u8>,
    /// The root's certificate.
    pub root: String,
}

fn element(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let length = (content.len() as u16).to_be_bytes();
    let length = match content.len() {
        0..0x80 => vec![length[1]],
        0x80..0x100 => vec![0x81, length[1]],
        _ => vec![0x82, length[0], length[1]],
    };
    [vec![tag], length, content].concat()
}

fn sequence(parts: &[&[u8]]) -> Vec<u8> {
    element(0x30, parts)
}

fn set(parts: &[&[u8]]) -> Vec<u8> {
    element(0x31, parts)
}

fn oid(content: &[u8]) -> Vec<u8> {
    element(6, &[content])
}

fn integer(value: u8) -> Vec<u8> {
    element(2, &[&[value]])
}

fn octets(content: &[u8]) -> Vec<u8> {
    element(4, &[content])
}

/// The first element: all of it, and its content.
fn first(bytes: &[u8]) -> (&[u8], &[u8]) {
    let (head, length) = match bytes[1] {
        0x82 => (4, usize::from(bytes[2]) << 8 | usize::from(bytes[3])),
        0x81 => (3, usize::from(bytes[2])),
        length => (2, usize::from(length)),
    };
    (&bytes[..head + length], &bytes[head..head + length])
}

/// The elements inside of the first one.
fn children(bytes: &[u8]) -> Vec<&[u8]> {
    let (mut rest, mut found) = (first(bytes).1, Vec::new());
    while !rest.is_empty() {
        found.push(first(rest).0);
        rest = &rest[found[found.len() - 1].len()..];
    }
    found
}

impl Tsa {
    pub fn new() -> Tsa {
        let named = |name: &str| {
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, name);
            params.use_authority_key_identifier_extension = true;
            params
        };
        let mut root = named("Clock: root");
        root.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        root.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let root = CertifiedIssuer::self_signed(root, KeyPair::generate().unwrap()).unwrap();
        let mut params = named("Clock");
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        // Critical, as RFC 3161 asks for; rcgen's own is not.
        let usage = sequence(&[&oid(TIME_STAMPING)]);
        let mut usage = CustomExtension::from_oid_content(EXTENDED_KEY_USAGE, usage);
        usage.set_criticality(true);
        params.custom_extensions.push(usage);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &root).unwrap().der().to_vec();
        Tsa { key, certificate, root: root.pem() }
    }

    /// `TimeStampToken` for a `TimeStampReq`.
    fn token(&self, request: &[u8]) -> Vec<u8> {
        let fields = children(request);
        let time = Utc::now().rfc3339().replace(['-', ':', 'T'], "");
        let (time, _) = time.split_at(14);
        let time = element(0x18, &[time.as_bytes(), b"Z"]);
        let info = sequence(&[&integer(1), &oid(POLICY), fields[1], &integer(7), &time, fields[2]]);
        let attribute = |kind, value: &[u8]| sequence(&[&oid(kind), &set(&[value])]);
        let attributes = [
            attribute(CONTENT_TYPE, &oid(TST_INFO)),
            attribute(MESSAGE_DIGEST, &octets(digest(&SHA256, &info).as_ref())),
        ]
        .concat();
        // Signed with the tag of a set, written with another.
        let signature = self.key.sign(&set(&[&attributes])).unwrap();
        let hashing = sequence(&[&oid(SHA_256)]);
        // Version, serial number, algorithm, issuer, …
        let certificate = children(children(&self.certificate)[0]);
        let signer = sequence(&[
            &integer(1),
            &sequence(&[certificate[3], certificate[1]]),
            &hashing,
            &element(0xa0, &[&attributes]),
            &sequence(&[&oid(ECDSA_WITH_SHA_256)]),
            &octets(&signature),
        ]);
        let signed = sequence(&[
            &integer(3),
            &set(&[&hashing]),
            &sequence(&[&oid(TST_INFO), &element(0xa0, &[&octets(&info)])]),
            &element(0xa0, &[&self.certificate]),
            &set(&[&signer]),
        ]);
        sequence(&[&oid(SIGNED_DATA), &element(0xa0, &[&signed])])
    }

    /// `TimeStampResp` for a `TimeStampReq`.
    pub fn answer(&self, request: &[u8]) -> Vec<u8> {
        sequence(&[&sequence(&[&integer(0)]), &self.token(request)])
    }
}

/// Serves answers to the bodies of POST requests: their number, the body; status and body. Returns the address.
pub fn serve(answer: impl Fn(usize, &[u8]) -> (&'static str, Vec<u8>) + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/tsa", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let mut stream = stream.unwrap();
            let (mut request, mut buffer) = (Vec::new(), [0; 4096]);
            // The head, and then a body of as many bytes as its DER tells.
            let body = loop {
                let n = stream.read(&mut buffer).unwrap_or(0);
                request.extend_from_slice(&buffer[..n]);
                let head = request.windows(4).position(|end| end == b"\r\n\r\n");
                let body = head.map(|head| &request[head + 4..]).unwrap_or_default();
                if n == 0 || body.len() > 2 && body.len() >= 2 + usize::from(body[1]) {
                    break body.to_vec();
                }
            };
            assert!(request.starts_with(b"POST /tsa "));
            let (status, body) = answer(number, &body);
            let head =
                format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            let _ = stream.write_all(&[head.as_bytes(), &body].concat());
        }
    });
    url
}
