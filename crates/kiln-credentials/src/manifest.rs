//! A manifest: what is claimed of an image, hashed and signed (C2PA 2.4, chapters 10 to 18).

use std::ops::Range;

use kiln_base::Utc;
use ring::digest::{SHA256, digest};

use crate::Result;
use crate::carried::{self, Carried};
use crate::cbor::Value;
use crate::jumbf::{self, Kind, Superbox};

const SPEC_VERSION: &str = "2.4.0";
const ACTIONS: &str = "c2pa.actions.v2";
const DATA_HASH: &str = "c2pa.hash.data";
const INGREDIENT: &str = "c2pa.ingredient.v3";
const AI_DISCLOSURE: &str = "c2pa.ai-disclosure";
const CLAIM: &str = "c2pa.claim.v2";
const SIGNATURE: &str = "c2pa.signature";
const ASSERTIONS: &str = "c2pa.assertions";

/// What is said of an image, and signed.
#[derive(Clone, Debug)]
pub struct Statement {
    /// The program and its version.
    pub generator: (String, String),
    /// The model, such as `FLUX.2 klein 4B`.
    pub model: String,
    /// Who provides the service or the image, if that is told.
    pub producer: Option<String>,
    /// The images that it was made from.
    pub ingredients: Vec<Ingredient>,
    /// IPTC's address of how much of it a model made.
    pub source: String,
    /// Whether it has an invisible watermark.
    pub watermarked: bool,
    /// When it was made.
    pub when: Utc,
}

/// An image that another was made from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ingredient {
    /// What it was for.
    pub role: Role,
    /// Its own credentials, if they are carried over.
    pub credentials: Option<Carried>,
}

/// What an image was for that another was made from. Its file is not named: that may tell more than its owner means to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Its pixels were changed: an initial image.
    Initial,
    /// It was looked at.
    Reference,
}

/// Where the store will lie in the file, and the hash of all else.
pub(crate) struct Binding {
    pub range: Range<usize>,
    pub hash: Vec<u8>,
    /// Bytes that make the store's length even.
    pub padding: usize,
}

/// Returns a store with one manifest. `seal` makes the signature of its claim.
pub(crate) fn store(
    statement: &Statement,
    binding: &Binding,
    id: &str,
    format: &str,
    seal: &dyn Fn(&[u8]) -> Result<Vec<u8>>,
) -> Result<Vec<u8>> {
    let label = format!("urn:c2pa:{id}");
    let all: Vec<_> = statement.ingredients.iter().map(|own| own.credentials.as_ref()).collect();
    let (carried, mut manifests) = carried::selected(&all);
    let ingredients = statement.ingredients.iter().zip(carried).enumerate().map(|(i, (own, carried))| {
        let label = if i == 0 { INGREDIENT.to_owned() } else { format!("{INGREDIENT}__{i}") };
        (own.role, Assertion::new(&label, &ingredient(own.role, carried)))
    });
    let ingredients: Vec<_> = ingredients.collect();
    let mut assertions = vec![
        Assertion::new(ACTIONS, &actions(statement, &ingredients)),
        Assertion::new(DATA_HASH, &data_hash(binding)),
        Assertion::new(AI_DISCLOSURE, &disclosure(statement)),
    ];
    assertions.extend(ingredients.into_iter().map(|(_, assertion)| assertion));
    let (name, version) = &statement.generator;
    let claim = Value::object([
        ("instanceID", Some(Value::text(format!("xmp:iid:{id}")))),
        ("alg", Some(Value::text("sha256"))),
        ("dc:format", Some(Value::text(format))),
        (
            "claim_generator_info",
            Some(Value::object([
                ("name", Some(Value::text(name))),
                ("version", Some(Value::text(version))),
                ("specVersion", Some(Value::text(SPEC_VERSION))),
                ("org.kiln.producer", statement.producer.as_ref().map(Value::text)),
            ])),
        ),
        ("signature", Some(Value::text(format!("self#jumbf=/c2pa/{label}/{SIGNATURE}")))),
        ("created_assertions", Some(Value::Array(assertions.iter().map(Assertion::link).collect()))),
    ]);
    let claim = claim.encode();
    let signature = seal(&claim)?;
    let boxes: Vec<_> = assertions.into_iter().map(|assertion| assertion.superbox).collect();
    let manifest = [
        jumbf::superbox(Kind::AssertionStore, ASSERTIONS, &boxes),
        jumbf::cbor(Kind::Claim, CLAIM, &claim),
        jumbf::cbor(Kind::Signature, SIGNATURE, &signature),
    ];
    // The last one is that of the file.
    manifests.push(jumbf::superbox(Kind::Manifest, &label, &manifest));
    Ok(jumbf::superbox(Kind::Store, "c2pa", &manifests))
}

struct Assertion {
    label: String,
    superbox: Vec<u8>,
}

impl Assertion {
    fn new(label: &str, value: &Value) -> Assertion {
        Assertion { label: label.to_owned(), superbox: jumbf::cbor(Kind::Cbor, label, &value.encode()) }
    }

    /// Its address with its hash.
    fn link(&self) -> Value {
        let hash = digest(&SHA256, jumbf::hashed(&self.superbox));
        Value::object([
            ("url", Some(Value::text(format!("self#jumbf={ASSERTIONS}/{}", self.label)))),
            ("hash", Some(Value::Bytes(hash.as_ref().to_vec()))),
        ])
    }
}

/// What was done: created from words and references, or an image opened and edited.
fn actions(statement: &Statement, ingredients: &[(Role, Assertion)]) -> Value {
    let links = |role: Role| -> Vec<Value> {
        ingredients.iter().filter(|(own, _)| *own == role).map(|(_, assertion)| assertion.link()).collect()
    };
    let parameters = |links: Vec<Value>| {
        (!links.is_empty()).then(|| Value::object([("ingredients", Some(Value::Array(links)))]))
    };
    let initial = links(Role::Initial);
    let is_edit = !initial.is_empty();
    let work = Value::object([
        ("action", Some(Value::text(if is_edit { "c2pa.edited" } else { "c2pa.created" }))),
        ("when", Some(Value::Tag(0, Value::text(statement.when.rfc3339()).into()))),
        ("softwareAgent", Some(Value::object([("name", Some(Value::text(&statement.model)))]))),
        ("digitalSourceType", Some(Value::text(&statement.source))),
        ("parameters", parameters(links(Role::Reference))),
    ]);
    let opened = is_edit.then(|| {
        Value::object([("action", Some(Value::text("c2pa.opened"))), ("parameters", parameters(initial))])
    });
    // Not bound: C2PA's list of watermarks knows others.
    let mark = || Value::object([("action", Some(Value::text("c2pa.watermarked.unbound")))]);
    let watermarked = statement.watermarked.then(mark);
    Value::object([
        ("actions", Some(Value::Array(opened.into_iter().chain([work]).chain(watermarked).collect()))),
        ("allActionsIncluded", Some(Value::Bool(true))),
    ])
}

fn data_hash(binding: &Binding) -> Value {
    let exclusion = Value::object([
        ("start", Some(Value::Unsigned(binding.range.start as u64))),
        ("length", Some(Value::Unsigned(binding.range.len() as u64))),
    ]);
    Value::object([
        ("exclusions", Some(Value::Array(vec![exclusion]))),
        ("hash", Some(Value::Bytes(binding.hash.clone()))),
        ("pad", Some(Value::Bytes(vec![0; binding.padding]))),
    ])
}

fn disclosure(statement: &Statement) -> Value {
    Value::object([
        ("modelType", Some(Value::text("c2pa.types.model"))),
        ("modelName", Some(Value::text(&statement.model))),
    ])
}

fn ingredient(role: Role, carried: Option<&Carried>) -> Value {
    let (title, relationship) = match role {
        Role::Initial => ("initial image", "parentOf"),
        Role::Reference => ("reference image", "inputTo"),
    };
    Value::object([
        ("dc:title", Some(Value::text(title))),
        ("relationship", Some(Value::text(relationship))),
        ("activeManifest", carried.map(Carried::manifest_link)),
        ("claimSignature", carried.map(Carried::signature_link)),
        ("validationResults", carried.map(Carried::results)),
    ])
}

/// Whether bytes are a manifest store.
pub fn is_store(bytes: &[u8]) -> bool {
    Superbox::read(bytes).is_some_and(|store| store.label == "c2pa" && store.children().next().is_some())
}
