//! The priority of a job: jobs of a lower one wait while there are others.

use serde::{Deserialize, Serialize};

/// Which jobs go first. Between jobs of one priority, clients take turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// When nothing else waits.
    Low,
    /// In turn.
    #[default]
    Normal,
    /// Before all others.
    High,
}

impl Priority {
    pub(crate) const ALL: [Priority; 3] = [Priority::Low, Priority::Normal, Priority::High];

    /// The name used in JSON and in files of API keys.
    pub fn name(self) -> &'static str {
        match self {
            Priority::Low => "low",
            Priority::Normal => "normal",
            Priority::High => "high",
        }
    }

    /// Parses a name.
    pub fn parse(name: &str) -> Option<Priority> {
        Priority::ALL.into_iter().find(|priority| priority.name() == name)
    }

    /// The number that stands for it in the database.
    pub(crate) fn number(self) -> i64 {
        self as i64 - Priority::Normal as i64
    }

    /// The priority that a number of the database stands for.
    pub(crate) fn from_number(number: i64) -> Priority {
        Priority::ALL.into_iter().find(|priority| priority.number() == number).unwrap_or_default()
    }
}
