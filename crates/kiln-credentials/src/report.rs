//! What is found out about the credentials of a file.

use serde::Serialize;

/// What the credentials of a file are worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Nothing has changed since an authority's signer, or one of the given roots', signed the file.
    Trusted,
    /// Nothing has changed since somebody signed it, whom nobody vouches for.
    Valid,
    /// Something has changed, or the signature is none.
    Invalid,
    /// The file has no credentials.
    None,
    /// It has some, which were not checked.
    NotChecked,
}

/// The credentials of a file. All but the state is what the file claims; with [`State::Invalid`] anybody may have written it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// What they are worth.
    pub state: State,
    /// Who vouches for the signer of a trusted file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trusted_by: Option<&'static str>,
    /// Why it is not trusted, not valid or not checked.
    pub problems: Vec<Problem>,
    /// Whom the certificate names.
    pub signer: Option<String>,
    /// The authority that made the certificate.
    pub issuer: Option<String>,
    /// When it was signed, as RFC 3339: as the signer says.
    pub time: Option<String>,
    /// Whether a known authority has stamped the time of the signature.
    pub time_stamped: bool,
    /// The program that wrote the credentials, with its version.
    pub generator: Option<String>,
    /// The model or program that made the image.
    pub model: Option<String>,
    /// Who provides the image, besides the certificate's name.
    pub producer: Option<String>,
    /// What was done, in order.
    pub actions: Vec<Action>,
    /// What it was made from.
    pub ingredients: Vec<FoundIngredient>,
}

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// C2PA's code for it, such as `assertion.dataHash.mismatch`.
    pub code: String,
    /// What it means.
    pub message: String,
}

/// A step in the making of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Action {
    /// Such as `c2pa.created`.
    pub action: String,
    /// IPTC's term for how much a model made, such as `trainedAlgorithmicMedia`.
    pub source: Option<String>,
    /// With what.
    pub agent: Option<String>,
    /// When.
    pub when: Option<String>,
}

/// An image that another was made from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FoundIngredient {
    /// Its name, or what it was for.
    pub title: Option<String>,
    /// `parentOf`: it was changed; `inputTo`: it was looked at; `componentOf`: it is in there.
    pub relationship: Option<String>,
    /// What its own credentials were worth when it was used, as the signer of the file says; `none` if it had none.
    pub state: State,
    /// Whom its certificate names.
    pub signer: Option<String>,
    /// The program that made it.
    pub generator: Option<String>,
}

impl Report {
    /// A report without any claims.
    pub(crate) fn of(state: State) -> Report {
        Report {
            state,
            trusted_by: None,
            problems: Vec::new(),
            signer: None,
            issuer: None,
            time: None,
            time_stamped: false,
            generator: None,
            model: None,
            producer: None,
            actions: Vec::new(),
            ingredients: Vec::new(),
        }
    }

    /// Credentials that were not checked, and why.
    pub fn not_checked(code: &str, message: impl Into<String>) -> Report {
        let problem = Problem { code: code.into(), message: message.into() };
        Report { problems: vec![problem], ..Report::of(State::NotChecked) }
    }

    /// The state in plain words, in a line.
    pub fn summary(&self) -> String {
        let by = || self.signer.as_deref().map(|signer| format!(" by {signer}")).unwrap_or_default();
        let why = || self.problems.first().map_or("", |problem| &problem.message[..]);
        match self.state {
            State::Trusted => format!("trusted: signed{}", by()),
            State::Valid => format!("valid, signer unknown: signed{}", by()),
            State::Invalid => format!("invalid: {}", why()),
            State::None => "none".into(),
            State::NotChecked => format!("present, not checked: {}", why()),
        }
    }
}

impl State {
    /// The state in a word, as the JSON has it.
    pub fn name(self) -> &'static str {
        match self {
            State::Trusted => "trusted",
            State::Valid => "valid",
            State::Invalid => "invalid",
            State::None => "none",
            State::NotChecked => "not_checked",
        }
    }
}
