//! The LoRAs that trainings have written, and whose they are. A LoRA outlives its training, and so does this record.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use kiln_base::lock;

use super::Training;

const FILE: &str = "loras.json";

/// The LoRAs of trainings, with the client that each belongs to.
pub(crate) struct TrainedLoras {
    path: PathBuf,
    owners: Mutex<BTreeMap<String, String>>,
}

impl TrainedLoras {
    /// Reads the record, and adds the LoRAs of trainings that an earlier version has run.
    pub(super) fn load(folder: &Path, trainings: &[Arc<Training>]) -> TrainedLoras {
        let path = folder.join(FILE);
        let mut owners: BTreeMap<String, String> = match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).unwrap_or_else(|error| {
                tracing::error!(%error, "the record of trained LoRAs can't be read");
                BTreeMap::new()
            }),
            Err(_) => BTreeMap::new(),
        };
        for training in trainings {
            if let Some(lora) = training.snapshot().lora {
                owners.entry(lora).or_insert_with(|| training.client.clone());
            }
        }
        TrainedLoras { path, owners: Mutex::new(owners) }
    }

    /// The client that a LoRA belongs to; `None` if no training has written it.
    pub(crate) fn owner(&self, name: &str) -> Option<String> {
        lock(&self.owners).get(name).cloned()
    }

    pub(super) fn insert(&self, name: &str, client: &str) {
        let mut owners = lock(&self.owners);
        owners.insert(name.to_owned(), client.to_owned());
        self.save(&owners);
    }

    pub(super) fn remove(&self, name: &str) {
        let mut owners = lock(&self.owners);
        owners.remove(name);
        self.save(&owners);
    }

    fn save(&self, owners: &BTreeMap<String, String>) {
        let bytes = serde_json::to_vec_pretty(owners).unwrap_or_default();
        // The training's own record names the LoRA, too, until the training is deleted.
        if let Err(error) = kiln_base::write_atomic(&self.path, &bytes) {
            tracing::error!(%error, "the record of trained LoRAs can't be written");
        }
    }
}
