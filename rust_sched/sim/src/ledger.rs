//! What a run counts.

/// One request of a run; times are seconds since its begin.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Record {
    /// Which request of the trace it is.
    pub request: usize,
    /// When it arrived.
    pub arrival: f64,
    /// When its first token was out.
    pub first: f64,
    /// When its last one was.
    pub finish: f64,
    /// Output tokens.
    pub tokens: u64,
    /// Rounds that committed them.
    pub rounds: u64,
    /// The replica that decoded it.
    pub replica: usize,
}

/// Totals of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// From the begin to the last token.
    pub seconds: f64,
    /// Output tokens.
    pub tokens: u64,
    /// Until when load was as asked: what comes after is the end of a run, with fewer requests than there would be. The
    /// whole run of a closed loop with less than two requests a user.
    pub window_seconds: f64,
    /// Output tokens until then.
    pub window_tokens: u64,
    /// Steps of all replicas.
    pub steps: u64,
    /// Steps that drafted.
    pub drafting_steps: u64,
    /// Tokens that forwards executed.
    pub executed: u64,
    /// Prompt tokens among them.
    pub prompt_tokens: u64,
    /// Rounds of a request that committed tokens.
    pub rounds: u64,
    /// Drafted tokens.
    pub drafted: u64,
    /// Drafts that were verified.
    pub verified: u64,
    /// Drafts that were accepted.
    pub accepted: u64,
    /// Seconds of steps, all replicas.
    pub busy_seconds: f64,
    /// Seconds of drafting among them.
    pub draft_seconds: f64,
    /// Most requests decoded at once by a replica.
    pub peak_live: usize,
    /// Most cache tokens reserved at once in a replica.
    pub peak_reserved: u64,
    /// Steps by gamma, `[gamma + 1]`.
    pub gammas: Vec<u64>,
    /// Requests in the order in which they arrived.
    pub records: Vec<Record>,
}

impl Report {
    /// Output tokens a second, while load was as asked.
    #[must_use]
    pub fn throughput(&self) -> f64 {
        if self.window_seconds > 0.0 && self.window_tokens > 0 {
            self.window_tokens as f64 / self.window_seconds
        } else {
            self.tokens as f64 / self.seconds
        }
    }

    /// tau: tokens committed a round.
    #[must_use]
    pub fn accepted_length(&self) -> f64 {
        self.tokens as f64 / self.rounds as f64
    }

    /// Drafts verified a round.
    #[must_use]
    pub fn verify_budget(&self) -> f64 {
        self.verified as f64 / self.rounds as f64
    }
}
