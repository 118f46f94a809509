//! Files that say where they come from: the mark of everything that leaves the server, and who signs.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use kiln_base::unix_seconds;
use kiln_credentials::{Ingredient, NewCredentials, Role, Statement, sign};
use kiln_engine::{Credentials, KeySource};
use kiln_image::{Format, read_ai_mark, read_manifest_store};
use rcgen::{
    CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, date_time_ymd,
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::harness::{TestServer, base64, events, png};

/// A signer whose certificate expires at a moment.
pub fn signer(until: i64) -> Arc<Credentials> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "Ada");
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::EmailProtection];
    params.not_after = date_time_ymd(1970, 1, 1) + Duration::from_secs(until as u64);
    let key = KeyPair::generate().unwrap();
    let folder = TempDir::new().unwrap();
    let files = NewCredentials::in_folder(folder.path());
    std::fs::write(&files.key, key.serialize_pem()).unwrap();
    std::fs::write(&files.certificate, params.self_signed(&key).unwrap().pem()).unwrap();
    let source = KeySource::Folder(folder.path().to_owned());
    Arc::new(Credentials::open(source, None, None).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn jobs_are_refused_before_they_are_generated_when_the_certificate_expires() {
    let until = unix_seconds() + 2;
    let own = signer(until);
    let credentials = Some(Arc::clone(&own));
    let server = TestServer::open(
        Arc::new(TempDir::new().unwrap()),
        |config| config.embedded.credentials = credentials,
        false,
    );
    assert_eq!(server.get("/v1/about").await.ok().json()["signed_by"], "Ada");
    // Generated, it would fail with `generation_failed`.
    let accepted = server.submit(json!({ "prompt": "fail" })).await;
    while own.signer.check().is_ok() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(unix_seconds() > until);
    let refused = server.post("/v1/jobs", json!({ "prompt": "fail" })).await;
    let refused = refused.expect_error(503, "signing_failed").json();
    assert!(
        refused["error"]["message"].as_str().unwrap().contains("the certificate expired on "),
        "{refused}"
    );
    let refused = server.post("/v1/images/generations", json!({ "prompt": "fail" })).await;
    refused.expect_error(503, "signing_failed");
    server.generate(1);
    let job = server.wait(&accepted).await;
    assert_eq!((&job["status"], &job["error"]["code"]), (&json!("failed"), &json!("signing_failed")));
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_of_inputs_are_noted() {
    let own = signer(unix_seconds() + 3600);
    let statement = Statement {
        generator: ("Camera".into(), "1".into()),
        model: "None".into(),
        producer: None,
        ingredients: vec![Ingredient { role: Role::Reference, credentials: None }],
        source: kiln_image::AiSource::Generated.address(),
        watermarked: false,
        when: kiln_base::Utc::now(),
    };
    let signed = base64(&sign(&png(32, 32), Format::Png, &statement, &own.signer).unwrap());
    let plain = base64(&png(16, 16));
    let credentials = Some(own);
    let server = TestServer::with(|config| config.embedded.credentials = credentials);
    let body = json!({ "prompt": "a", "references": [plain, signed.as_str()], "init": signed.as_str() });
    let job = server.wait(&server.submit(body).await).await;
    let lost = |role: &str| format!("`{role}` has credentials (C2PA), which are not carried over");
    assert_eq!(job["notes"], json!([lost("init"), lost("reference 2")]), "{job}");
    let file = server.get(job["images"][0]["url"].as_str().unwrap()).await.ok().bytes;
    let store = read_manifest_store(&file).unwrap().unwrap();
    assert!(String::from_utf8_lossy(&store).contains("parentOf"));
    let job = server.wait(&server.submit(json!({ "prompt": "a", "references": [plain] })).await).await;
    assert!(job["notes"].as_array().is_none_or(Vec::is_empty), "{job}");
}

/// The source that an image file names.
fn mark(file: &[u8]) -> Option<String> {
    read_ai_mark(file).unwrap().map(|mark| mark.source)
}

fn decoded(text: &Value) -> Vec<u8> {
    let text = text.as_str().unwrap();
    BASE64_STANDARD.decode(text.strip_prefix("data:image/jpeg;base64,").unwrap_or(text)).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_image_file_that_leaves_the_server_has_the_mark() {
    for ai_mark in [true, false] {
        let server = TestServer::with(|config| config.embedded.ai_mark = ai_mark);
        let expected = ai_mark.then(|| "trainedAlgorithmicMedia".to_owned());
        for format in ["png", "jpeg", "webp"] {
            let body = json!({
                "prompt": "slow", "steps": 6, "stream": true, "partial_images": 2, "size": "64x64",
                "output_format": format,
            });
            let answer = server.post("/v1/images/generations", body).await.ok();
            let events = events(answer.text());
            assert_eq!(events.len(), 3);
            for (name, data) in &events {
                assert_eq!(mark(&decoded(&data["b64_json"])), expected, "{name}, {format}");
            }
        }
        let body = json!({ "prompt": "slow", "steps": 4, "init": base64(&png(64, 64)) });
        let id = server.submit(body).await;
        let stream = server.get(&format!("/v1/jobs/{id}/events?previews=true")).await.ok();
        let expected = ai_mark.then(|| "compositeWithTrainedAlgorithmicMedia".to_owned());
        let previews = events(stream.text()).into_iter().filter(|(name, _)| name == "preview");
        let previews: Vec<_> = previews.map(|(_, data)| mark(&decoded(&data["image"]))).collect();
        assert!(!previews.is_empty() && previews.iter().all(|found| *found == expected), "{previews:?}");
        let job = server.wait(&id).await;
        for file in ["url", "thumbnail"] {
            let file = server.get(job["images"][0][file].as_str().unwrap()).await.ok().bytes;
            assert_eq!(mark(&file), expected);
        }
    }
}
