//! Pulling models from a hub that fails in many ways.

mod server;

use std::fs;
use std::path::Path;
use std::time::Duration;

use kiln_base::hex;
use kiln_hub::{Cache, Error, HubSettings, ModelName, PullProgress, PullSummary, pull};
use server::{COMMIT, Hub, HubBehavior, HubFile};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

const REPO: &str = "someone/FLUX.2-tiny";

fn lfs_file(count: usize) -> HubFile {
    let bytes: Vec<u8> = (0..count).map(|i| (i * 7919 % 251) as u8).collect();
    HubFile { hash: hex(Sha256::digest(&bytes)), bytes, large: true }
}

fn small_file(text: &str) -> HubFile {
    let hash = hex(Sha1::digest(format!("blob {}\0{text}", text.len())));
    HubFile { bytes: text.into(), hash, large: false }
}

fn model() -> Vec<(String, HubFile)> {
    vec![
        ("README.md".into(), small_file("read me")),
        ("model_index.json".into(), small_file("{}")),
        ("transformer/config.json".into(), small_file("{\"a\":1}")),
        ("transformer/diffusion_pytorch_model.safetensors".into(), lfs_file(1_000_003)),
        ("all-in-one.safetensors".into(), lfs_file(77)),
    ]
}

/// A hub with one repository, and an empty cache.
struct Fixture {
    hub: Hub,
    folder: TempDir,
}

impl Fixture {
    fn new(files: Vec<(String, HubFile)>, behavior: HubBehavior) -> Fixture {
        Fixture { hub: Hub::start(REPO, files, behavior), folder: tempfile::tempdir().unwrap() }
    }

    fn settings(&self) -> HubSettings {
        HubSettings {
            endpoint: self.hub.endpoint(),
            cache: self.folder.path().join("hub"),
            attempts: 3,
            backoff: Duration::from_millis(1),
            ..HubSettings::default()
        }
    }

    fn pull(&self, name: &str) -> Result<PullSummary, Error> {
        pull(&self.settings(), &ModelName::parse(name).unwrap(), &mut |_| true)
    }

    fn cache(&self) -> Cache {
        Cache::new(self.settings().cache)
    }

    #[track_caller]
    fn assert_model_is_installed(&self) {
        let folder = self.cache().find(&ModelName::parse(REPO).unwrap()).unwrap().unwrap();
        let weights = folder.join("transformer/diffusion_pytorch_model.safetensors");
        assert!(fs::read(weights).unwrap() == lfs_file(1_000_003).bytes);
        assert_eq!(fs::read(folder.join("transformer/config.json")).unwrap(), b"{\"a\":1}");
        assert!(!folder.join("all-in-one.safetensors").exists() && !folder.join("README.md").exists());
    }
}

#[test]
fn a_model_is_stored_in_the_layout_of_the_shared_cache() {
    let fixture = Fixture::new(model(), HubBehavior { redirect: true, ..HubBehavior::default() });
    let mut last = None;
    let name = ModelName::parse(REPO).unwrap();
    let pulled =
        pull(&fixture.settings(), &name, &mut |PullProgress { done, total, index, files, .. }| {
            assert!(done <= total && index < files && Some(done) >= last);
            last = Some(done);
            true
        });
    let pulled = pulled.unwrap();
    assert_eq!((pulled.files, pulled.bytes), (3, 1_000_003 + 2 + 7));
    assert_eq!((pulled.downloaded, last), (pulled.bytes, Some(pulled.bytes)));
    fixture.assert_model_is_installed();
    let repo = fixture.folder.path().join("hub/models--someone--FLUX.2-tiny");
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    let config = pulled.snapshot.join("transformer/config.json");
    if cfg!(unix) || config.is_symlink() {
        assert!(repo.join("blobs").join(lfs_file(1_000_003).hash).is_file());
        let link = fs::read_link(config).unwrap();
        assert_eq!(link, Path::new("../../../blobs").join(small_file("{\"a\":1}").hash));
    } else {
        assert_eq!(fs::read_dir(repo.join("blobs")).unwrap().count(), 0, "the files are in the snapshot");
    }
    let requests = fixture.hub.requests.lock().unwrap().len();
    assert_eq!(fixture.pull(REPO).unwrap().downloaded, 0);
    assert_eq!(fixture.hub.requests.lock().unwrap().len(), requests + 1, "only the list is requested again");
}

#[test]
fn a_connection_that_keeps_breaking_completes() {
    // The first file needs three attempts, the second one, the third five.
    let drop_after = vec![0, 0, 5, 9, 0, 0, 1, 300_000];
    let fixture = Fixture::new(model(), HubBehavior { drop_after, ..HubBehavior::default() });
    fixture.pull(REPO).unwrap();
    fixture.assert_model_is_installed();
    let requests = fixture.hub.requests.lock().unwrap();
    let ranges: Vec<_> = requests.iter().filter_map(|request| request.headers.get("range")).collect();
    assert!(ranges.iter().any(|range| range.as_str() == "bytes=300001-"), "{ranges:?}");
}

#[test]
fn a_pull_without_progress_fails_and_a_later_one_resumes() {
    let drop_after = [2, 7, 400_000, 0, 0, 0].to_vec();
    let fixture = Fixture::new(model(), HubBehavior { drop_after, ..HubBehavior::default() });
    let error = fixture.pull(REPO).unwrap_err();
    assert!(matches!(error, Error::Connection { .. }), "{error}");
    let installed = fixture.cache().list();
    assert!(installed.is_empty() || installed[0].incomplete);
    let pulled = fixture.pull(REPO).unwrap();
    assert_eq!(pulled.downloaded, 600_003, "the partial download was not resumed");
    fixture.assert_model_is_installed();
}

#[test]
fn without_working_ranges_the_whole_file_is_downloaded_again() {
    for behavior in [
        HubBehavior { no_ranges: true, ..HubBehavior::default() },
        HubBehavior { wrong_range: true, ..HubBehavior::default() },
    ] {
        let fixture = Fixture::new(model(), HubBehavior { drop_after: vec![2, 7, 500_000], ..behavior });
        fixture.pull(REPO).unwrap();
        fixture.assert_model_is_installed();
    }
}

#[test]
fn a_busy_hub_is_retried() {
    for status in [500, 503, 429] {
        let fixture = Fixture::new(model(), HubBehavior { busy: (2, status), ..HubBehavior::default() });
        fixture.pull(REPO).unwrap();
    }
    let fixture = Fixture::new(model(), HubBehavior { busy: (9, 503), ..HubBehavior::default() });
    assert!(fixture.pull(REPO).unwrap_err().to_string().contains("503"));
}

#[test]
fn damaged_downloads_are_deleted() {
    for index in [1, 3] {
        let mut files = model();
        let last = files[index].1.bytes.len() - 1;
        files[index].1.bytes[last] ^= 1;
        let fixture = Fixture::new(files.clone(), HubBehavior::default());
        let error = fixture.pull(REPO).unwrap_err();
        assert!(
            matches!(&error, Error::Checksum { expected, .. } if *expected == files[index].1.hash),
            "{error}"
        );
        let blobs = fixture.folder.path().join("hub/models--someone--FLUX.2-tiny/blobs");
        let mut names = fs::read_dir(blobs).unwrap().flatten().map(|e| e.file_name().into_string().unwrap());
        assert!(names.all(|name| !name.starts_with(&files[index].1.hash)));
        assert!(fixture.cache().find(&ModelName::parse(REPO).unwrap()).unwrap().is_none());
    }
}

#[test]
fn surplus_bytes_are_an_error() {
    let fixture = Fixture::new(model(), HubBehavior { surplus: 10, ..HubBehavior::default() });
    let error = fixture.pull(REPO).unwrap_err().to_string();
    assert!(error.contains("more than"), "{error}");
}

#[test]
fn gated_repositories_need_a_token_and_accepted_terms() {
    let gate = |status, code| Some(("good".to_owned(), status, code));
    let with = |token: Option<&str>, gate| {
        let fixture = Fixture::new(model(), HubBehavior { gate, redirect: true, ..HubBehavior::default() });
        let settings = HubSettings { token: token.map(str::to_owned), ..fixture.settings() };
        (pull(&settings, &ModelName::parse(REPO).unwrap(), &mut |_| true), fixture)
    };
    for status in [401, 403] {
        assert!(matches!(with(None, gate(status, "GatedRepo")).0, Err(Error::Unauthorised { .. })));
        let (result, fixture) = with(Some("bad"), gate(status, "GatedRepo"));
        let page = format!("{}/{REPO}", fixture.hub.endpoint());
        assert!(matches!(result, Err(Error::Gated { page: p, .. }) if p == page));
    }
    assert!(matches!(with(Some("bad"), gate(401, "")).0, Err(Error::Unauthorised { status: 401, .. })));
    let (pulled, fixture) = with(Some("good"), gate(401, "GatedRepo"));
    pulled.unwrap();
    let requests = fixture.hub.requests.lock().unwrap();
    let at_other_host: Vec<_> = requests.iter().filter(|request| request.path.starts_with("/cdn/")).collect();
    assert!(!at_other_host.is_empty());
    assert!(
        at_other_host.iter().all(|request| !request.headers.contains_key("authorization")),
        "the token was sent to another host"
    );
}

#[test]
fn missing_repositories_and_files_are_named() {
    let fixture = Fixture::new(model(), HubBehavior::default());
    for (name, word) in [("someone/other", "someone/other"), ("someone/FLUX.2-tiny@v9", "`v9`")] {
        let error = fixture.pull(name).unwrap_err();
        assert!(matches!(error, Error::NotFound { .. }) && error.to_string().contains(word), "{error}");
    }
    assert!(
        matches!(fixture.pull("someone/FLUX.2-tiny:Q4"), Err(Error::NoMatch { files, .. }) if files.len() == 2)
    );
    // A list with a file that the hub does not serve.
    let mut behavior = HubBehavior {
        list: Some(fixture.hub.list().replace("config.json", "lost.json")),
        ..HubBehavior::default()
    };
    let fixture = Fixture::new(model(), behavior.clone());
    assert!(fixture.pull(REPO).unwrap_err().to_string().contains("transformer/lost.json"));
    behavior.list = None;
    let unreachable = HubSettings { endpoint: "http://127.0.0.1:1".into(), ..fixture.settings() };
    let error = pull(&unreachable, &ModelName::parse(REPO).unwrap(), &mut |_| true).unwrap_err();
    assert!(matches!(error, Error::Connection { .. }), "{error}");
}

/// As Hugging Face's programs leave it where there are no symbolic links.
#[test]
fn a_cache_without_links_is_read_completed_and_removed() {
    let fixture = Fixture::new(model(), HubBehavior::default());
    let snapshot = fixture.pull(REPO).unwrap().snapshot;
    let (config, weights) = ("transformer/config.json", "transformer/diffusion_pytorch_model.safetensors");
    for name in ["model_index.json", config, weights] {
        let bytes = fs::read(snapshot.join(name)).unwrap();
        fs::remove_file(snapshot.join(name)).unwrap();
        fs::write(snapshot.join(name), bytes).unwrap();
    }
    let blobs = fixture.folder.path().join("hub/models--someone--FLUX.2-tiny/blobs");
    fs::remove_dir_all(&blobs).unwrap();
    fixture.assert_model_is_installed();
    let requests = fixture.hub.requests.lock().unwrap().len();
    assert_eq!(fixture.pull(REPO).unwrap().downloaded, 0);
    assert_eq!(fixture.hub.requests.lock().unwrap().len(), requests + 1, "only the list is requested");
    let installed = &fixture.cache().list()[0];
    assert_eq!((installed.is_complete(), installed.bytes), (true, 1_000_012));
    // A file that is cut short is downloaded again.
    fs::write(snapshot.join(config), "{").unwrap();
    assert_eq!(fixture.pull(REPO).unwrap().downloaded, 7);
    fixture.assert_model_is_installed();
    assert_eq!(fixture.cache().remove_matching(REPO, weights).unwrap(), 1_000_003);
    assert_eq!(fixture.cache().remove(REPO).unwrap(), 9);
}

#[test]
fn a_download_that_does_not_fit_on_the_disk_is_refused_before_it_begins() {
    let fixture = Fixture::new(model(), HubBehavior::default());
    let size = serde_json::from_str::<serde_json::Value>(&fixture.hub.list()).unwrap()["siblings"]
        .as_array()
        .unwrap()
        .iter()
        .find_map(|file| file["lfs"]["size"].as_u64())
        .unwrap();
    // Four exbibytes.
    let list = fixture.hub.list().replace(&format!("\"size\":{size}"), &format!("\"size\":{}", 1u64 << 62));
    let fixture = Fixture::new(model(), HubBehavior { list: Some(list), ..HubBehavior::default() });
    let error = fixture.pull(REPO).unwrap_err();
    let Error::NoSpace { needed, free, .. } = &error else { panic!("{error}") };
    assert!(free < needed, "{error}");
    assert!(error.to_string().contains("needs 4294967296."), "{error}");
    assert!(fixture.hub.requests.lock().unwrap().iter().all(|request| !request.path.contains("resolve")));
}

#[test]
fn malicious_lists_write_nothing() {
    let good = Fixture::new(model(), HubBehavior::default()).hub.list();
    let evil = |from: &str, to: &str| good.replacen(from, to, 1);
    for list in [
        evil("transformer/config.json", "../../../../evil"),
        evil("transformer/config.json", "/etc/evil"),
        evil("transformer/config.json", "transformer\\\\..\\\\evil"),
        evil("transformer/config.json", "C:evil"),
        evil("transformer/config.json", ""),
        evil(COMMIT, "../../evil"),
        evil(COMMIT, ""),
        evil(&small_file("{}").hash, "../../../evil"),
        evil(&lfs_file(1_000_003).hash, "/tmp/evil"),
        evil("\"size\":2,", ""),
        "[".repeat(100_000),
        "{}".into(),
        String::new(),
    ] {
        let fixture =
            Fixture::new(model(), HubBehavior { list: Some(list.clone()), ..HubBehavior::default() });
        let error = fixture.pull(REPO).unwrap_err();
        assert!(
            matches!(error, Error::UnsafeName { .. } | Error::BadResponse { .. }),
            "{error}: {list:.200}"
        );
        assert!(!fixture.folder.path().join("evil").exists() && fixture.cache().list().is_empty());
    }
}

#[test]
fn a_cancelled_pull_keeps_its_partial_download() {
    let fixture = Fixture::new(model(), HubBehavior::default());
    let name = ModelName::parse(REPO).unwrap();
    let cancelled = pull(&fixture.settings(), &name, &mut |progress| progress.done < 300_000);
    assert!(matches!(cancelled, Err(Error::Cancelled)));
    assert!(fixture.cache().find(&name).unwrap().is_none(), "a partial model is not found");
    let downloaded = fixture.pull(REPO).unwrap().downloaded;
    assert!(downloaded > 0 && downloaded < 1_000_003, "{downloaded}");
    fixture.assert_model_is_installed();
}

#[test]
fn single_files_can_be_pulled_found_and_removed() {
    let files = vec![
        ("tiny-Q4_K_M.gguf".to_owned(), lfs_file(1000)),
        ("tiny-Q8_0.gguf".to_owned(), lfs_file(2000)),
        ("a name.txt".to_owned(), small_file("x")),
    ];
    let fixture = Fixture::new(files, HubBehavior::default());
    assert!(matches!(fixture.pull(REPO), Err(Error::Ambiguous { .. })));
    fixture.pull("someone/FLUX.2-tiny:q4_k_m").unwrap();
    fixture.pull("someone/FLUX.2-tiny:a name.txt").unwrap();
    let cache = fixture.cache();
    let find = |name: &str| cache.find(&ModelName::parse(name).unwrap()).unwrap();
    assert!(find(REPO).unwrap().ends_with("tiny-Q4_K_M.gguf"), "the only weights");
    fixture.pull("someone/FLUX.2-tiny:*.gguf").unwrap();
    assert!(find(REPO).is_none() && find("someone/FLUX.2-tiny:Q8").unwrap().ends_with("tiny-Q8_0.gguf"));
    assert_eq!(cache.list()[0].bytes, 3001);
    assert_eq!(cache.remove_matching(REPO, "q8_0").unwrap(), 2000);
    assert!(find("someone/FLUX.2-tiny:Q8").is_none() && find(REPO).is_some());
    assert_eq!(cache.remove(REPO).unwrap(), 1001);
    assert!(cache.list().is_empty());
    assert!(cache.remove(REPO).is_err());
}

#[test]
fn other_folders_in_the_cache_are_ignored() {
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
fn concurrent_pulls_of_one_file_are_an_error() {
    let fixture = Fixture::new(model(), HubBehavior::default());
    let blobs = fixture.folder.path().join("hub/models--someone--FLUX.2-tiny/blobs");
    fs::create_dir_all(&blobs).unwrap();
    let locked = fs::File::create(blobs.join(format!("{}.incomplete", small_file("{}").hash))).unwrap();
    locked.lock().unwrap();
    assert!(matches!(fixture.pull(REPO), Err(Error::InProgress { .. })));
    drop(locked);
    fixture.pull(REPO).unwrap();
}

#[test]
fn a_mirror_below_a_path_with_relative_redirects_works() {
    let prefix = "/hub/mirror";
    let fixture = Fixture::new(model(), HubBehavior { prefix, redirect: true, ..HubBehavior::default() });
    assert!(fixture.hub.endpoint().ends_with(prefix));
    fixture.pull(REPO).unwrap();
    fixture.assert_model_is_installed();
    let requests = fixture.hub.requests.lock().unwrap();
    assert!(requests.iter().all(|request| request.path != "/outside"), "{requests:?}");
}

#[test]
fn a_plan_tells_size_and_licence_and_what_is_left() {
    let fixture = Fixture::new(model(), HubBehavior::default());
    let name = ModelName::parse(REPO).unwrap();
    let plan = |fixture: &Fixture| kiln_hub::plan(&fixture.settings(), &name).unwrap();
    let first = plan(&fixture);
    assert_eq!((first.files.len(), first.bytes, first.missing), (3, 1_000_012, 1_000_012));
    assert_eq!(first.licence.as_deref(), Some("apache-2.0"));
    assert!(fixture.cache().list().is_empty(), "a plan writes nothing");
    let _ = pull(&fixture.settings(), &name, &mut |progress| progress.done < 300_000);
    let left = plan(&fixture).missing;
    assert!(left > 0 && left < 1_000_003 - 200_000, "{left}");
    fixture.pull(REPO).unwrap();
    assert_eq!(plan(&fixture).missing, 0);
}

#[test]
fn a_licence_is_shown_as_plain_text_only() {
    let list = Fixture::new(model(), HubBehavior::default()).hub.list();
    for (card, licence) in [
        (r#""license":"other","license_name":"flux-non-commercial""#, Some("flux-non-commercial")),
        (r#""license":"other""#, Some("other")),
        (r#""license":"\u001b[2Jmit\n""#, Some("[2Jmit")),
        (r#""license":["mit","bsd"]"#, None),
        ("", None),
    ] {
        let list = Some(list.replace(r#""license":"apache-2.0""#, card));
        let fixture = Fixture::new(model(), HubBehavior { list, ..HubBehavior::default() });
        let plan = kiln_hub::plan(&fixture.settings(), &ModelName::parse(REPO).unwrap()).unwrap();
        assert_eq!(plan.licence.as_deref(), licence, "{card}");
    }
}

#[test]
fn parts_of_a_repository_are_listed_by_file_and_removed_one_by_one() {
    let fixture = Fixture::new(model(), HubBehavior::default());
    let transformer = format!("{REPO}:transformer/diffusion_pytorch_model.safetensors");
    let names = || -> Vec<(String, u64)> {
        let models = fixture.cache().list().into_iter().flat_map(|installed| installed.models());
        models.map(|model| (model.name.short(), model.bytes)).collect()
    };
    fixture.pull(&format!("{REPO}:transformer/*")).unwrap();
    assert_eq!(names(), [(transformer.clone(), 1_000_003)]);
    let find = |name: &str| fixture.cache().find(&ModelName::parse(name).unwrap()).unwrap();
    assert!(find(REPO).is_none(), "a component is not the model");
    assert!(find(&transformer).is_some());
    fixture.pull(&format!("{REPO}:all-in-one")).unwrap();
    assert_eq!(names().len(), 2);
    fixture.pull(REPO).unwrap();
    assert_eq!(names(), [(REPO.into(), 1_000_012), (format!("{REPO}:all-in-one.safetensors"), 77)]);
    for (name, _) in names().iter().skip(1) {
        let name = ModelName::parse(name).unwrap();
        assert_eq!(fixture.cache().files(&name), [("all-in-one.safetensors".to_owned(), 77)]);
        assert_eq!(fixture.cache().remove_matching(REPO, name.pattern.as_deref().unwrap()).unwrap(), 77);
    }
    assert_eq!(names(), [(REPO.into(), 1_000_012)]);
    assert_eq!(fixture.cache().remove_matching(REPO, "*").unwrap(), 1_000_012);
    assert!(fixture.cache().list().is_empty() && !fixture.cache().list().iter().any(|m| m.folder.exists()));
}

#[test]
fn revisions_are_listed_and_removed_apart() {
    let fixture = Fixture::new(model(), HubBehavior::default());
    let at_commit = format!("{REPO}@{COMMIT}");
    fixture.pull(&format!("{at_commit}:all-in-one")).unwrap();
    let list = fixture.cache().list();
    assert_eq!((list.len(), list[0].models()[0].name.short()), (1, at_commit.clone()));
    // Another revision with a file of its own.
    let repo = fixture.folder.path().join("hub/models--someone--FLUX.2-tiny");
    fs::create_dir_all(repo.join("refs")).unwrap();
    fs::write(repo.join("refs/main"), COMMIT).unwrap();
    fs::write(repo.join("refs/v2"), "abc").unwrap();
    fs::create_dir_all(repo.join("snapshots/abc")).unwrap();
    fs::write(repo.join("snapshots/abc/other.gguf"), "123").unwrap();
    let names = || -> Vec<String> {
        fixture.cache().list().iter().flat_map(|one| one.models()).map(|model| model.name.short()).collect()
    };
    assert_eq!(names(), [REPO.to_owned(), format!("{REPO}@v2")]);
    fixture.cache().remove_revision(REPO, "v2").unwrap();
    assert_eq!(names(), [REPO]);
    assert_eq!(fixture.cache().remove_revision(REPO, "main").unwrap(), 77);
    assert!(!repo.exists());
}

#[test]
fn a_stalled_download_is_given_up_and_resumed_later() {
    let behavior = HubBehavior { stall_after: Some(0), ..HubBehavior::default() };
    let fixture = Fixture::new(vec![("a.safetensors".into(), lfs_file(100_003))], behavior);
    let settings = HubSettings { timeout: Duration::from_secs(1), attempts: 2, ..fixture.settings() };
    let name = ModelName::parse(REPO).unwrap();
    let mut present = 0;
    let mut pull_on = |settings: &HubSettings| {
        pull(settings, &name, &mut |progress| {
            present = progress.done;
            true
        })
    };
    assert!(matches!(pull_on(&settings), Err(Error::Connection { .. })));
    // A few bytes in each connection are no progress.
    fixture.hub.behavior.lock().unwrap().stall_after = Some(10);
    assert!(matches!(pull_on(&settings), Err(Error::Connection { .. })));
    fixture.hub.behavior.lock().unwrap().stall_after = None;
    let pulled = pull_on(&fixture.settings()).unwrap();
    assert_eq!(pulled.downloaded, 100_003 - 20);
    assert_eq!(present, 100_003);
}
