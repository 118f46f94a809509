//! Fetching models from a hub that is slow, rude or broken.

mod server;

use std::fs;
use std::path::Path;
use std::time::Duration;

use kiln_hub::{Cache, Error, Name, Progress, Pulled, Settings, pull};
use server::{COMMIT, Hub, Manners, Served};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

const REPO: &str = "someone/FLUX.2-tiny";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn large(count: usize) -> Served {
    let bytes: Vec<u8> = (0..count).map(|i| (i * 7919 % 251) as u8).collect();
    Served { hash: hex(&Sha256::digest(&bytes)), bytes, large: true }
}

fn small(text: &str) -> Served {
    let hash = hex(&Sha1::digest(format!("blob {}\0{text}", text.len())));
    Served { bytes: text.into(), hash, large: false }
}

fn model() -> Vec<(String, Served)> {
    vec![
        ("README.md".into(), small("read me")),
        ("model_index.json".into(), small("{}")),
        ("transformer/config.json".into(), small("{\"a\":1}")),
        ("transformer/diffusion_pytorch_model.safetensors".into(), large(1_000_003)),
        ("all-in-one.safetensors".into(), large(77)),
    ]
}

struct Kit {
    hub: Hub,
    folder: TempDir,
}

impl Kit {
    fn new(files: Vec<(String, Served)>, manners: Manners) -> Kit {
        Kit { hub: Hub::start(REPO, files, manners), folder: tempfile::tempdir().unwrap() }
    }

    fn settings(&self) -> Settings {
        Settings {
            endpoint: self.hub.endpoint(),
            cache: self.folder.path().join("hub"),
            attempts: 3,
            pause: Duration::from_millis(1),
            ..Settings::default()
        }
    }

    fn pull(&self, name: &str) -> Result<Pulled, Error> {
        pull(&self.settings(), &Name::parse(name).unwrap(), &mut |_| true)
    }

    fn cache(&self) -> Cache {
        Cache::new(self.settings().cache)
    }

    #[track_caller]
    fn has_whole_model(&self) {
        let folder = self.cache().find(&Name::parse(REPO).unwrap()).unwrap().unwrap();
        let weights = folder.join("transformer/diffusion_pytorch_model.safetensors");
        assert!(fs::read(weights).unwrap() == large(1_000_003).bytes);
        assert_eq!(fs::read(folder.join("transformer/config.json")).unwrap(), b"{\"a\":1}");
        assert!(!folder.join("all-in-one.safetensors").exists() && !folder.join("README.md").exists());
    }
}

#[test]
fn a_model_lands_in_the_layout_of_the_shared_cache() {
    let kit = Kit::new(model(), Manners { redirect: true, ..Manners::default() });
    let mut last = None;
    let name = Name::parse(REPO).unwrap();
    let pulled = pull(&kit.settings(), &name, &mut |Progress { done, total, index, files, .. }| {
        assert!(done <= total && index < files && Some(done) >= last);
        last = Some(done);
        true
    });
    let pulled = pulled.unwrap();
    assert_eq!((pulled.files, pulled.bytes), (3, 1_000_003 + 2 + 7));
    assert_eq!((pulled.fetched, last), (pulled.bytes, Some(pulled.bytes)));
    kit.has_whole_model();
    let repo = kit.folder.path().join("hub/models--someone--FLUX.2-tiny");
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    assert!(repo.join("blobs").join(large(1_000_003).hash).is_file());
    #[cfg(unix)]
    {
        let link = fs::read_link(pulled.snapshot.join("transformer/config.json")).unwrap();
        assert_eq!(link, Path::new("../../../blobs").join(small("{\"a\":1}").hash));
    }
    let asked = kit.hub.asked.lock().unwrap().len();
    assert_eq!(kit.pull(REPO).unwrap().fetched, 0);
    assert_eq!(kit.hub.asked.lock().unwrap().len(), asked + 1, "only the list is asked for again");
}

#[test]
fn a_connection_that_breaks_time_and_again_gets_there() {
    // The first file comes at the third attempt, the second at once, the third at the fifth.
    let drop_after = vec![0, 0, 5, 9, 0, 0, 1, 300_000];
    let kit = Kit::new(model(), Manners { drop_after, ..Manners::default() });
    kit.pull(REPO).unwrap();
    kit.has_whole_model();
    let asked = kit.hub.asked.lock().unwrap();
    let ranges: Vec<_> = asked.iter().filter_map(|a| a.headers.get("range")).collect();
    assert!(ranges.iter().any(|range| range.as_str() == "bytes=300001-"), "{ranges:?}");
}

#[test]
fn a_connection_that_brings_nothing_is_given_up_and_a_later_run_goes_on() {
    let drop_after = [2, 7, 400_000, 0, 0, 0].to_vec();
    let kit = Kit::new(model(), Manners { drop_after, ..Manners::default() });
    let told = kit.pull(REPO).unwrap_err();
    assert!(matches!(told, Error::Connection { .. }), "{told}");
    let found = kit.cache().list();
    assert!(found.is_empty() || found[0].incomplete);
    let pulled = kit.pull(REPO).unwrap();
    assert_eq!(pulled.fetched, 600_003, "what had come was fetched again");
    kit.has_whole_model();
}

#[test]
fn a_hub_that_knows_no_parts_or_gives_wrong_ones_is_asked_for_the_whole() {
    for manners in [
        Manners { no_ranges: true, ..Manners::default() },
        Manners { wrong_range: true, ..Manners::default() },
    ] {
        let kit = Kit::new(model(), Manners { drop_after: vec![2, 7, 500_000], ..manners });
        kit.pull(REPO).unwrap();
        kit.has_whole_model();
    }
}

#[test]
fn a_busy_hub_is_asked_again() {
    for status in [500, 503, 429] {
        let kit = Kit::new(model(), Manners { busy: (2, status), ..Manners::default() });
        kit.pull(REPO).unwrap();
    }
    let kit = Kit::new(model(), Manners { busy: (9, 503), ..Manners::default() });
    assert!(kit.pull(REPO).unwrap_err().to_string().contains("503"));
}

#[test]
fn what_comes_damaged_is_thrown_away() {
    for at in [1, 3] {
        let mut files = model();
        let last = files[at].1.bytes.len() - 1;
        files[at].1.bytes[last] ^= 1;
        let kit = Kit::new(files.clone(), Manners::default());
        let told = kit.pull(REPO).unwrap_err();
        assert!(matches!(&told, Error::Checksum { expected, .. } if *expected == files[at].1.hash), "{told}");
        let blobs = kit.folder.path().join("hub/models--someone--FLUX.2-tiny/blobs");
        let left = fs::read_dir(blobs).unwrap().flatten().map(|e| e.file_name().into_string().unwrap());
        assert!(left.into_iter().all(|name| !name.starts_with(&files[at].1.hash)));
        assert!(kit.cache().find(&Name::parse(REPO).unwrap()).unwrap().is_none());
    }
}

#[test]
fn a_hub_that_sends_too_much_is_stopped() {
    let kit = Kit::new(model(), Manners { surplus: 10, ..Manners::default() });
    let told = kit.pull(REPO).unwrap_err().to_string();
    assert!(told.contains("more than"), "{told}");
}

#[test]
fn gated_repositories_ask_for_a_token_and_for_consent() {
    let gate = |status, code| Some(("good".to_owned(), status, code));
    let with = |token: Option<&str>, gate| {
        let kit = Kit::new(model(), Manners { gate, redirect: true, ..Manners::default() });
        let settings = Settings { token: token.map(str::to_owned), ..kit.settings() };
        (pull(&settings, &Name::parse(REPO).unwrap(), &mut |_| true), kit)
    };
    for status in [401, 403] {
        assert!(matches!(with(None, gate(status, "GatedRepo")).0, Err(Error::Unauthorised { .. })));
        let (told, kit) = with(Some("bad"), gate(status, "GatedRepo"));
        let page = format!("{}/{REPO}", kit.hub.endpoint());
        assert!(matches!(told, Err(Error::Gated { page: p, .. }) if p == page));
    }
    assert!(matches!(with(Some("bad"), gate(401, "")).0, Err(Error::Unauthorised { status: 401, .. })));
    let (pulled, kit) = with(Some("good"), gate(401, "GatedRepo"));
    pulled.unwrap();
    let asked = kit.hub.asked.lock().unwrap();
    let at_other_host: Vec<_> = asked.iter().filter(|a| a.path.starts_with("/cdn/")).collect();
    assert!(!at_other_host.is_empty());
    assert!(
        at_other_host.iter().all(|a| !a.headers.contains_key("authorization")),
        "the token went elsewhere"
    );
}

#[test]
fn what_is_not_there_is_named() {
    let kit = Kit::new(model(), Manners::default());
    for (name, word) in [("someone/other", "someone/other"), ("someone/FLUX.2-tiny@v9", "`v9`")] {
        let told = kit.pull(name).unwrap_err();
        assert!(matches!(told, Error::NotFound { .. }) && told.to_string().contains(word), "{told}");
    }
    assert!(
        matches!(kit.pull("someone/FLUX.2-tiny:Q4"), Err(Error::NoMatch { files, .. }) if files.len() == 2)
    );
    // A list with a file that the hub doesn't have.
    let mut manners =
        Manners { list: Some(kit.hub.list().replace("config.json", "lost.json")), ..Manners::default() };
    let kit = Kit::new(model(), manners.clone());
    assert!(kit.pull(REPO).unwrap_err().to_string().contains("transformer/lost.json"));
    manners.list = None;
    let nobody = Settings { endpoint: "http://127.0.0.1:1".into(), ..kit.settings() };
    let told = pull(&nobody, &Name::parse(REPO).unwrap(), &mut |_| true).unwrap_err();
    assert!(matches!(told, Error::Connection { .. }), "{told}");
}

#[test]
fn lists_that_lie_write_nothing_anywhere() {
    let good = Kit::new(model(), Manners::default()).hub.list();
    let evil = |from: &str, to: &str| good.replacen(from, to, 1);
    for list in [
        evil("transformer/config.json", "../../../../evil"),
        evil("transformer/config.json", "/etc/evil"),
        evil("transformer/config.json", "transformer\\\\..\\\\evil"),
        evil("transformer/config.json", "C:evil"),
        evil("transformer/config.json", ""),
        evil(COMMIT, "../../evil"),
        evil(COMMIT, ""),
        evil(&small("{}").hash, "../../../evil"),
        evil(&large(1_000_003).hash, "/tmp/evil"),
        evil("\"size\":2,", ""),
        "[".repeat(100_000),
        "{}".into(),
        String::new(),
    ] {
        let kit = Kit::new(model(), Manners { list: Some(list.clone()), ..Manners::default() });
        let told = kit.pull(REPO).unwrap_err();
        assert!(matches!(told, Error::UnsafeName { .. } | Error::Answer { .. }), "{told}: {list:.200}");
        assert!(!kit.folder.path().join("evil").exists() && kit.cache().list().is_empty());
    }
}

#[test]
fn a_pull_that_is_stopped_keeps_what_has_come() {
    let kit = Kit::new(model(), Manners::default());
    let name = Name::parse(REPO).unwrap();
    let stopped = pull(&kit.settings(), &name, &mut |progress| progress.done < 300_000);
    assert!(matches!(stopped, Err(Error::Cancelled)));
    assert!(kit.cache().find(&name).unwrap().is_none(), "half a model is none");
    let fetched = kit.pull(REPO).unwrap().fetched;
    assert!(fetched > 0 && fetched < 1_000_003, "{fetched}");
    kit.has_whole_model();
}

#[test]
fn one_file_can_be_chosen_found_and_removed() {
    let files = vec![
        ("tiny-Q4_K_M.gguf".to_owned(), large(1000)),
        ("tiny-Q8_0.gguf".to_owned(), large(2000)),
        ("a name.txt".to_owned(), small("x")),
    ];
    let kit = Kit::new(files, Manners::default());
    assert!(matches!(kit.pull(REPO), Err(Error::Choose { .. })));
    kit.pull("someone/FLUX.2-tiny:q4_k_m").unwrap();
    kit.pull("someone/FLUX.2-tiny:a name.txt").unwrap();
    let cache = kit.cache();
    let find = |name: &str| cache.find(&Name::parse(name).unwrap()).unwrap();
    assert!(find(REPO).unwrap().ends_with("tiny-Q4_K_M.gguf"), "the only weights");
    kit.pull("someone/FLUX.2-tiny:*.gguf").unwrap();
    assert!(find(REPO).is_none() && find("someone/FLUX.2-tiny:Q8").unwrap().ends_with("tiny-Q8_0.gguf"));
    assert_eq!(cache.list()[0].bytes, 3001);
    assert_eq!(cache.remove_matching(REPO, "q8_0").unwrap(), 2000);
    assert!(find("someone/FLUX.2-tiny:Q8").is_none() && find(REPO).is_some());
    assert_eq!(cache.remove(REPO).unwrap(), 1001);
    assert!(cache.list().is_empty());
    assert!(cache.remove(REPO).is_err());
}

#[test]
fn strangers_in_the_cache_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    for name in [
        "models--a--b/blobs",
        "models--..--x/blobs",
        "datasets--a--b/blobs",
        "models--lonely/blobs",
        "models--a--c/refs",
    ] {
        fs::create_dir_all(folder.path().join(name)).unwrap();
    }
    fs::write(folder.path().join("models--a--c/refs/main"), "../../..").unwrap();
    fs::write(folder.path().join("version.txt"), "1").unwrap();
    assert!(Cache::new(folder.path()).list().is_empty());
}

#[test]
fn two_pulls_of_one_file_do_not_meet() {
    let kit = Kit::new(model(), Manners::default());
    let blobs = kit.folder.path().join("hub/models--someone--FLUX.2-tiny/blobs");
    fs::create_dir_all(&blobs).unwrap();
    let held = fs::File::create(blobs.join(format!("{}.incomplete", small("{}").hash))).unwrap();
    held.lock().unwrap();
    assert!(matches!(kit.pull(REPO), Err(Error::Busy { .. })));
    drop(held);
    kit.pull(REPO).unwrap();
}
