//! What the credentials of a file claim.

use encypher_c2pa::VerificationReport;
use serde_json::Value;

use super::text::text;
use super::words::UNTRUSTED;
use crate::report::{Action, FoundIngredient, Report, State};

/// Maximum entries of a list in a report.
pub(super) const MAX_LIST: usize = 32;

/// The report without what the validator found out.
pub(super) fn report(found: &VerificationReport) -> Report {
    let manifests = &found.manifest_report["manifests"];
    let active = &manifests[found.manifest_report["active_manifest"].as_str().unwrap_or_default()];
    let actions: Vec<Action> = assertions(active, "c2pa.actions")
        .flat_map(|data| data["actions"].as_array().map(Vec::as_slice).unwrap_or_default())
        .take(MAX_LIST)
        .map(action)
        .collect();
    let disclosed = assertions(active, "c2pa.ai-disclosure").find_map(|data| string(&data["modelName"]));
    let made = actions.iter().rev().filter(|action| action.source.is_some());
    let agent = made.filter_map(|action| action.agent.clone()).next();
    let generator = generator_info(active);
    let succeeded = |code: &str| found.validation_results.success.iter().any(|status| status.code == code);
    Report {
        signer: string(&active["signature_info"]["common_name"]),
        issuer: string(&active["signature_info"]["issuer"]),
        time: actions.iter().rev().find_map(|action| action.when.clone()),
        time_stamped: succeeded("timeStamp.trusted"),
        generator: generator_name(active),
        model: disclosed.or(agent),
        producer: string(&generator["org.kiln.producer"]),
        ingredients: labelled(active, "c2pa.ingredient")
            .take(MAX_LIST)
            .map(|(label, data)| ingredient(data, manifests, is_refuted(found, label)))
            .collect(),
        actions,
        ..Report::of(State::Invalid)
    }
}

/// The contents of the assertions of a kind, whatever their version and number.
fn assertions<'a>(manifest: &'a Value, kind: &'static str) -> impl Iterator<Item = &'a Value> {
    labelled(manifest, kind).map(|(_, data)| data)
}

fn labelled<'a>(manifest: &'a Value, kind: &'static str) -> impl Iterator<Item = (&'a str, &'a Value)> {
    let all = manifest["assertions"].as_array().map(Vec::as_slice).unwrap_or_default();
    all.iter().filter_map(move |assertion| {
        let label = assertion["label"].as_str()?;
        let rest = label.strip_prefix(kind)?;
        let is_kind = rest.is_empty() || rest.starts_with(".v") || rest.starts_with("__");
        is_kind.then_some((label, &assertion["data"]))
    })
}

/// Whether an ingredient's manifest is not what the signer of the file says it was.
fn is_refuted(found: &VerificationReport, label: &str) -> bool {
    let active = found.manifest_report["active_manifest"].as_str().unwrap_or_default();
    let address = format!("self#jumbf=/c2pa/{active}/c2pa.assertions/{label}");
    refuted(found).any(|own| own == address)
}

/// The addresses of ingredients whose manifests are not what was said of them, also of those of ingredients.
pub(super) fn refuted(found: &VerificationReport) -> impl Iterator<Item = &str> {
    let deltas = found.manifest_report["validation_results"]["ingredientDeltas"].as_array();
    let is_refuted = |delta: &&Value| {
        let failures = delta["validationDeltas"]["failure"].as_array();
        failures
            .into_iter()
            .flatten()
            .any(|status| status["details"]["source"] != "recorded" && status["code"] != UNTRUSTED)
    };
    deltas
        .into_iter()
        .flatten()
        .filter(is_refuted)
        .filter_map(|delta| delta["ingredientAssertionURI"].as_str())
}

fn action(data: &Value) -> Action {
    let agent = &data["softwareAgent"];
    let source = string(&data["digitalSourceType"]);
    Action {
        action: string(&data["action"]).unwrap_or_default(),
        source: source.map(|address| address.rsplit('/').next().unwrap_or_default().to_owned()),
        agent: string(agent).or_else(|| string(&agent["name"])),
        when: string(&data["when"]),
    }
}

fn ingredient(data: &Value, manifests: &Value, is_refuted: bool) -> FoundIngredient {
    let link =
        if data["activeManifest"].is_null() { &data["c2pa_manifest"] } else { &data["activeManifest"] };
    let label = link["url"].as_str().and_then(|address| address.rsplit('/').next()).unwrap_or_default();
    let manifest = &manifests[label];
    let results = &data["validationResults"]["activeManifest"];
    let codes = |list: &str| -> Vec<&str> {
        let all = results[list].as_array().map(Vec::as_slice).unwrap_or_default();
        all.iter().filter_map(|status| status["code"].as_str()).collect()
    };
    let state = if link.is_null() {
        State::None
    } else if is_refuted {
        State::Invalid
    } else if !results.is_object() {
        State::NotChecked
    } else if codes("failure").iter().any(|code| *code != UNTRUSTED) {
        State::Invalid
    } else if codes("success").contains(&"signingCredential.trusted") {
        State::Trusted
    } else {
        State::Valid
    };
    FoundIngredient {
        title: string(&data["dc:title"]),
        relationship: string(&data["relationship"]),
        state,
        signer: string(&manifest["signature_info"]["common_name"]),
        generator: generator_name(manifest),
    }
}

/// What a manifest says of the program that wrote it: a map, or a list of maps in earlier versions.
fn generator_info(manifest: &Value) -> &Value {
    let info = &manifest["claim_generator_info"];
    info.get(0).unwrap_or(info)
}

fn generator_name(manifest: &Value) -> Option<String> {
    let info = generator_info(manifest);
    let name = string(&info["name"])?;
    Some(string(&info["version"]).map_or(name.clone(), |version| format!("{name} {version}")))
}

fn string(value: &Value) -> Option<String> {
    value.as_str().map(text).filter(|text| !text.is_empty())
}
