//! Checking credentials: what is right, what was changed, and what was made to harm.

use std::path::{Path, PathBuf};

use kiln_base::Utc;
use kiln_credentials::{
    CAN_VERIFY, Ingredient, NewCredentials, Report, Role, Signer, State, Statement, Trust, carry, sign,
    verify,
};
use kiln_image::{AiSource, Format, RgbImage, encode, with_manifest_store};

const FORMATS: [Format; 3] = [Format::Png, Format::Jpeg, Format::Webp];

struct Studio {
    signer: Signer,
    trust: Trust,
    root: PathBuf,
    _folder: tempfile::TempDir,
}

impl Studio {
    fn new() -> Studio {
        let folder = tempfile::tempdir().unwrap();
        let files = NewCredentials::in_folder(folder.path());
        files.create("Ada's studio").unwrap();
        let mut trust = Trust::default();
        trust.add(&files.root).unwrap();
        Studio {
            signer: Signer::open(&files.key, &files.certificate).unwrap(),
            trust,
            root: files.root,
            _folder: folder,
        }
    }

    fn signed(&self, format: Format, statement: &Statement) -> Vec<u8> {
        sign(&plain(format), format, statement, &self.signer).unwrap()
    }
}

fn plain(format: Format) -> Vec<u8> {
    let image = RgbImage::new(16, 8, (0..16 * 8 * 3).map(|value| (value * 7) as u8).collect()).unwrap();
    encode(&image, format, Some("{}")).unwrap()
}

fn statement(ingredients: Vec<Role>) -> Statement {
    let is_edit = ingredients.contains(&Role::Initial);
    let source = if is_edit { AiSource::Composite } else { AiSource::Generated };
    Statement {
        generator: ("Kiln".into(), "1.0.0".into()),
        model: "FLUX.2 klein 4B".into(),
        producer: Some("Ada".into()),
        ingredients: ingredients.into_iter().map(|role| Ingredient { role, credentials: None }).collect(),
        source: source.address(),
        watermarked: false,
        when: Utc::now(),
    }
}

/// A file with a store that nobody signed.
fn with_store(store: &[u8]) -> Vec<u8> {
    with_manifest_store(&plain(Format::Png), store).unwrap().0
}

fn boxed(kind: &[u8; 4], content: &[u8]) -> Vec<u8> {
    [&(8 + content.len() as u32).to_be_bytes(), &kind[..], content].concat()
}

fn superbox(kind: &[u8; 4], label: &str, content: &[u8]) -> Vec<u8> {
    let tail = b"\x00\x11\x00\x10\x80\x00\x00\xaa\x00\x38\x9b\x71\x03";
    let description = boxed(b"jumd", &[&kind[..], tail, label.as_bytes(), &[0]].concat());
    boxed(b"jumb", &[description, content.to_vec()].concat())
}

fn codes(report: &Report) -> Vec<&str> {
    report.problems.iter().map(|problem| &problem.code[..]).collect()
}

#[test]
fn a_file_without_credentials_has_none() {
    for format in FORMATS {
        assert_eq!(verify(plain(format), &Trust::default()).state, State::None);
    }
    assert_eq!(verify(b"words".to_vec(), &Trust::default()).state, State::None);
    assert_eq!(verify(Vec::new(), &Trust::default()).state, State::None);
}

#[test]
fn a_signed_file_is_trusted_by_those_who_have_the_root() {
    let studio = Studio::new();
    for format in FORMATS {
        let file = studio.signed(format, &statement(vec![Role::Initial, Role::Reference]));
        if !CAN_VERIFY {
            let report = verify(file, &studio.trust);
            assert_eq!((report.state, codes(&report)), (State::NotChecked, vec!["kiln.notBuilt"]));
            continue;
        }
        let known = verify(file.clone(), &studio.trust);
        assert_eq!((known.state, known.trusted_by), (State::Trusted, Some("a given root")), "{format:?}");
        let mut own = studio.trust.clone();
        own.add_own(&studio.root).unwrap();
        assert_eq!(verify(file.clone(), &own).trusted_by, Some("the own root of this machine"), "{format:?}");
        let unknown = verify(file, &Trust::default());
        assert_eq!(unknown.state, State::Valid);
        assert_eq!(codes(&unknown), ["signingCredential.untrusted"]);
        for report in [known, unknown] {
            assert_eq!(report.signer.as_deref(), Some("Ada's studio"));
            assert_eq!(report.generator.as_deref(), Some("Kiln 1.0.0"));
            assert_eq!(report.model.as_deref(), Some("FLUX.2 klein 4B"));
            assert_eq!(report.producer.as_deref(), Some("Ada"));
            assert!(report.time.unwrap().starts_with("20") && !report.time_stamped);
            let actions: Vec<_> = report.actions.iter().map(|action| &action.action[..]).collect();
            assert_eq!(actions, ["c2pa.opened", "c2pa.edited"]);
            assert_eq!(report.actions[1].source.as_deref(), Some("compositeWithTrainedAlgorithmicMedia"));
            let made_from = |i: usize| {
                let ingredient = &report.ingredients[i];
                (ingredient.relationship.as_deref().unwrap(), ingredient.state)
            };
            assert_eq!((made_from(0), made_from(1)), (("parentOf", State::None), ("inputTo", State::None)));
        }
    }
}

#[test]
fn a_root_that_did_not_sign_makes_nobody_trusted() {
    let (studio, other) = (Studio::new(), Studio::new());
    let file = studio.signed(Format::Png, &statement(vec![]));
    let state = verify(file, &other.trust).state;
    assert_eq!(state, if CAN_VERIFY { State::Valid } else { State::NotChecked });
    let folder = tempfile::tempdir().unwrap();
    for text in ["", "words", "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n"] {
        let path = folder.path().join("root.pem");
        std::fs::write(&path, text).unwrap();
        assert!(Trust::default().add(&path).is_err(), "{text}");
    }
    assert!(Trust::default().add(Path::new("/none.pem")).is_err());
}

/// A copy that differs in one piece: where, and how.
fn tampered(file: &[u8], random: &mut impl FnMut(usize) -> usize) -> (String, Vec<u8>) {
    let (mut file, at, count) = (file.to_vec(), random(file.len()), 1 + random(40));
    let end = (at + count).min(file.len());
    let how = match random(4) {
        0 => {
            file[at] ^= 1 + random(255) as u8;
            "changed"
        }
        1 => {
            file.truncate(at);
            "cut"
        }
        2 => {
            file.splice(at..at, (0..count).map(|_| random(256) as u8));
            "added"
        }
        _ => {
            file.drain(at..end);
            "removed"
        }
    };
    (format!("{how} at {at}"), file)
}

/// `KILN_MUTATIONS` is how many copies; 10,000 take some minutes without optimization.
#[test]
fn no_copy_that_was_tampered_with_is_valid() {
    if !CAN_VERIFY {
        return;
    }
    let count = std::env::var("KILN_MUTATIONS").map_or(300, |count| count.parse().unwrap());
    let studio = Studio::new();
    let files: Vec<_> = FORMATS
        .into_iter()
        .flat_map(|format| [vec![], vec![Role::Initial, Role::Reference]].map(|all| (format, all)))
        .map(|(format, all)| studio.signed(format, &statement(all)))
        .collect();
    let mut seed = 1u64;
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % below
    };
    let (mut invalid, mut none) = (0, 0);
    for i in 0..count {
        let whole = &files[i % files.len()];
        let (how, copy) = tampered(whole, &mut random);
        let report = verify(copy.clone(), &studio.trust);
        match report.state {
            State::Invalid => invalid += 1,
            State::None => none += 1,
            // Lengths and names of boxes, and checksums of chunks, are not signed.
            State::Trusted if how.starts_with("changed") && unsigned(whole, &copy) => {}
            state => panic!("file {}, {how} of {}: {state:?} {report:?}", i % files.len(), whole.len()),
        }
        assert_eq!(report.state == State::Invalid, !report.problems.is_empty(), "{how}: {report:?}");
    }
    assert!(invalid > count / 2 && none > 0, "{invalid} invalid, {none} none of {count}");
}

/// Whether the only byte that differs is in the store or its frame.
fn unsigned(whole: &[u8], copy: &[u8]) -> bool {
    let at = whole.iter().zip(copy).position(|(a, b)| a != b).unwrap_or(0);
    let start = whole.windows(4).position(|bytes| bytes == b"jumb").unwrap() - 4;
    let length = u32::from_be_bytes(whole[start..start + 4].try_into().unwrap()) as usize;
    (start.saturating_sub(24)..start + length + 4).contains(&at)
}

#[test]
fn stores_that_are_no_statements_are_invalid() {
    let manifest = superbox(b"c2ma", "urn:c2pa:1", &[]);
    let mut deep = Vec::new();
    for _ in 0..20_000 {
        deep = superbox(b"c2ma", "a", &deep[..deep.len().min(60_000)]);
    }
    let cbor = |value: &[u8]| {
        let claim = superbox(b"c2cl", "c2pa.claim.v2", &boxed(b"cbor", value));
        superbox(b"c2pa", "c2pa", &superbox(b"c2ma", "urn:c2pa:1", &claim))
    };
    for (name, store) in [
        ("empty", superbox(b"c2pa", "c2pa", &[])),
        ("without a claim", superbox(b"c2pa", "c2pa", &manifest)),
        ("of many manifests", superbox(b"c2pa", "c2pa", &manifest.repeat(50_000))),
        ("deep", superbox(b"c2pa", "c2pa", &deep)),
        ("with a deep claim", cbor(&[0x81; 100_000])),
        ("with a long claim", cbor(&[0x9b, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff])),
        ("with a long text", cbor(&[0x7b, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff])),
        ("of zeros", vec![0; 1000]),
    ] {
        let report = verify(with_store(&store), &Trust::default());
        let expected = [State::Invalid, State::None, State::NotChecked];
        assert!(expected.contains(&report.state), "a store {name}: {report:?}");
        assert!(!CAN_VERIFY || report.state != State::NotChecked, "a store {name}: {report:?}");
    }
}

/// A manifest with 15 MB of zeros, compressed by Brotli.
const BOMB: &[u8] = &[
    0xcb, 0xff, 0xff, 0x3f, 0xf8, 0x9f, 0x05, 0xee, 0xde, 0x46, 0xb1, 0x70, 0xfd, 0xf1, 0xe0, 0xd3, 0x5a,
    0xfa, 0x1a, 0x00, 0x5e, 0x95, 0x24, 0xc8, 0xdc, 0x1e, 0x89, 0x90, 0x22, 0x8c, 0xe0, 0x68, 0x51, 0xad,
    0x38, 0x35, 0xc3, 0x06, 0xea, 0x1a, 0x40, 0x0d, 0x70, 0x53, 0xeb, 0x12, 0x10, 0x44, 0x8f, 0x69, 0x07,
    0x20, 0x20, 0xc1, 0x09, 0x2a, 0xe9, 0x3d, 0xc1, 0x88, 0x7b, 0x45, 0xc3, 0xd0, 0xe0, 0xc6, 0xaf, 0xff,
    0xa9, 0x78, 0x95, 0x23, 0xf2, 0x85, 0xf7, 0x7f, 0x98, 0x33, 0x00, 0x70, 0xf8, 0x27, 0x00, 0xe2, 0xb0,
    0x08, 0xc0, 0xfd, 0xfe, 0x0d,
];

#[test]
fn a_store_that_grows_when_it_is_unpacked_is_not_checked() {
    if !CAN_VERIFY {
        return;
    }
    let bombs = |count| {
        let bomb = superbox(b"c2cm", "urn:c2pa:1", &boxed(b"brob", BOMB));
        with_store(&superbox(b"c2pa", "c2pa", &bomb.repeat(count)))
    };
    assert_eq!(verify(bombs(1), &Trust::default()).state, State::Invalid);
    let report = verify(bombs(100_000), &Trust::default());
    assert_eq!((report.state, codes(&report)), (State::NotChecked, vec!["kiln.tooLarge"]));
    let large = with_store(&superbox(b"c2pa", "c2pa", &vec![0; 17 << 20]));
    assert_eq!(verify(large, &Trust::default()).state, State::NotChecked);
}

#[test]
fn texts_of_strangers_are_short_and_without_control_characters() {
    if !CAN_VERIFY {
        return;
    }
    let studio = Studio::new();
    let statement = Statement {
        model: format!("a\u{1b}[2J\u{202e}{}", "b".repeat(5000)),
        producer: Some("line\nline".into()),
        ..statement(vec![])
    };
    let report = verify(studio.signed(Format::Png, &statement), &studio.trust);
    assert_eq!(report.state, State::Trusted);
    let model = report.model.unwrap();
    assert!(model.starts_with("a[2Jbb") && model.chars().count() == 200, "{model}");
    assert_eq!(report.producer.as_deref(), Some("lineline"));
}

#[test]
fn an_edit_carries_the_credentials_of_its_inputs_over() {
    let (studio, other) = (Studio::new(), Studio::new());
    for format in FORMATS {
        let file = other.signed(format, &statement(vec![]));
        if !CAN_VERIFY {
            assert_eq!(carry(file), None);
            continue;
        }
        let mut changed = file.clone();
        let at = if format == Format::Webp { 30 } else { file.len() - 30 };
        changed[at] ^= 1;
        let edit = |inputs: &[(Role, &[u8])]| {
            let carried =
                |(role, file): &(Role, &[u8])| Ingredient { role: *role, credentials: carry(file.to_vec()) };
            let roles = inputs.iter().map(|(role, _)| *role).collect();
            let ingredients = inputs.iter().map(carried).collect();
            studio.signed(format, &Statement { ingredients, ..statement(roles) })
        };
        let plain = plain(format);
        let first = edit(&[(Role::Initial, &file), (Role::Reference, &changed), (Role::Reference, &plain)]);
        // The credentials of an edit have those of its inputs in them, each once.
        let second = edit(&[(Role::Initial, &first), (Role::Reference, &file)]);
        // The first input's is bound to by the first edit alone, which nobody changed.
        let mut forged = second.clone();
        let at = forged.windows(10).position(|bytes| bytes == b"instanceID").unwrap();
        forged[at + 20] ^= 1;
        let report = verify(forged, &studio.trust);
        let found = (report.state, codes(&report)[0].to_owned());
        assert_eq!(found, (State::Invalid, "ingredient.manifest.mismatch".into()), "{report:?}");
        let manifests = |file: &[u8]| file.windows(6).filter(|bytes| bytes == b"c2ma\0\x11").count();
        assert_eq!((manifests(&first), manifests(&second)), (2, 3));
        for (file, states) in [
            (first, vec![State::Valid, State::Invalid, State::None]),
            (second, vec![State::Valid, State::Valid]),
        ] {
            let report = verify(file, &studio.trust);
            assert_eq!(report.state, State::Trusted, "{format:?}: {report:?}");
            let found: Vec<_> = report.ingredients.iter().map(|ingredient| ingredient.state).collect();
            assert_eq!(found, states, "{format:?}: {report:?}");
            assert_eq!(report.ingredients[0].signer.as_deref(), Some("Ada's studio"));
        }
    }
}

#[test]
fn credentials_that_are_too_large_or_no_plain_manifests_are_not_carried_over() {
    let claim =
        superbox(b"c2ma", "urn:c2pa:1", &superbox(b"c2cs", "c2pa.signature", &boxed(b"cbor", &[0xa0])));
    let store = |content: &[u8]| with_store(&superbox(b"c2pa", "c2pa", content));
    let update = superbox(b"c2cm", "urn:c2pa:1", &boxed(b"brob", BOMB));
    for (name, content) in [
        ("compressed", update.clone()),
        ("compressed before a plain one", [update, claim.clone()].concat()),
        ("many", claim.repeat(100)),
        ("large", [superbox(b"c2ma", "a", &boxed(b"free", &vec![0; 5 << 20])), claim.clone()].concat()),
        ("with something behind", [claim, b"words".to_vec()].concat()),
    ] {
        assert_eq!(carry(store(&content)), None, "{name}");
    }
    assert_eq!((carry(plain(Format::Png)), carry(b"words".to_vec())), (None, None));
}

/// The server holds a permit in it.
#[test]
fn the_file_is_dropped_when_the_check_has_ended() {
    struct File(Vec<u8>, #[expect(dead_code, reason = "its end is what counts")] std::sync::mpsc::Sender<()>);
    impl AsRef<[u8]> for File {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    let (sender, receiver) = std::sync::mpsc::channel();
    verify(File(plain(Format::Png), sender), &Trust::default());
    assert_eq!(receiver.recv(), Err(std::sync::mpsc::RecvError));
}
