//! The models, LoRAs and VAEs of a fleet: what its workers announce.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use kiln_base::lock;
use kiln_engine::Request;

use super::announce::NodeModel;
use super::link::{Link, token};
use super::lora_previews;
use super::replica::Replica;
use crate::jobs::generator::{Catalogue, LoraInfo, ModelInfo, name};

/// What a gateway's requests can name.
pub(super) struct FleetCatalogue {
    link: Arc<Link>,
    replica: Arc<Replica>,
    /// Models that were announced, by name: a job for one whose workers are all gone waits for the next.
    known: Mutex<BTreeMap<String, NodeModel>>,
}

impl FleetCatalogue {
    pub(super) fn new(link: &Arc<Link>, replica: &Arc<Replica>) -> FleetCatalogue {
        FleetCatalogue { link: Arc::clone(link), replica: Arc::clone(replica), known: Mutex::default() }
    }

    pub(super) fn remember(&self, model: NodeModel) {
        lock(&self.known).insert(model.info.name.clone(), model);
    }

    pub(super) fn forget(&self, token_of_name: &str) {
        lock(&self.known).retain(|name, _| token(name) != token_of_name);
    }

    /// The models. The default, for requests that name none, is that of the worker that has run longest.
    fn all(&self) -> Vec<NodeModel> {
        let mut all = lock(&self.known).clone();
        let mut default = None;
        for node in self.replica.nodes().iter().filter(|node| node.worker) {
            for model in &node.models {
                if model.info.default {
                    default.get_or_insert_with(|| model.info.name.clone());
                }
                all.insert(model.info.name.clone(), model.clone());
            }
        }
        let remembered =
            || all.values().find(|model| model.info.default).map(|model| model.info.name.clone());
        let default = default.or_else(remembered).or_else(|| all.keys().next().cloned());
        let mut all: Vec<NodeModel> = all.into_values().collect();
        for model in &mut all {
            model.info.default = default.as_ref() == Some(&model.info.name);
        }
        all.sort_by_key(|model| !model.info.default);
        all
    }

    /// The model of a request, and its hash.
    pub(super) fn model_of(&self, request: &Request) -> (String, Option<String>) {
        let all = self.all();
        let named = request.model.as_deref().map(name);
        let model =
            all.iter().find(|model| named.map_or(model.info.default, |named| named == model.info.name));
        match model {
            Some(model) => (model.info.name.clone(), model.hash.clone()),
            None => (named.unwrap_or_default().to_owned(), None),
        }
    }
}

impl Catalogue for FleetCatalogue {
    fn models(&self) -> Vec<ModelInfo> {
        let model = |model: NodeModel| ModelInfo { rewrites: false, ..model.info };
        self.all().into_iter().map(model).collect()
    }

    fn loras(&self) -> Vec<String> {
        self.lora_details().into_iter().map(|lora| lora.name).collect()
    }

    fn vaes(&self) -> Vec<String> {
        let nodes = self.replica.nodes();
        let vaes: BTreeSet<&String> = nodes.iter().flat_map(|node| &node.vaes).collect();
        vaes.into_iter().cloned().collect()
    }

    fn lora_details(&self) -> Vec<LoraInfo> {
        let nodes = self.replica.nodes();
        let loras = nodes.iter().flat_map(|node| &node.loras).map(|lora| (&lora.name, lora));
        loras.collect::<BTreeMap<_, _>>().into_values().cloned().collect()
    }

    fn lora_preview(&self, name: &str) -> Option<Vec<u8>> {
        let has_it = |lora: &LoraInfo| lora.name == name && lora.has_preview;
        let known = self.replica.nodes().iter().any(|node| node.loras.iter().any(has_it));
        if known { lora_previews::ask(&self.link, name) } else { None }
    }

    fn model_hash(&self, name: &str) -> Option<String> {
        self.all().into_iter().find(|model| model.info.name == name)?.hash
    }
}
