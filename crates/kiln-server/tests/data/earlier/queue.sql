-- The queue of a server of commit 7a9097c that was killed: one job done, one cancelled, two running.
PRAGMA foreign_keys=OFF;
BEGIN TRANSACTION;
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    client TEXT NOT NULL,
    attached INTEGER NOT NULL,
    request TEXT NOT NULL,
    state TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    created INTEGER NOT NULL,
    started INTEGER,
    finished INTEGER,
    error_code TEXT,
    error TEXT
, notes TEXT, priority INTEGER NOT NULL DEFAULT 0);
INSERT INTO jobs VALUES(1,'39e188df2d1812fc2677ac91','127.0.0.1',0,'{"prompt":"an apple","width":64,"height":64,"seed":7,"steps":1,"output_format":"jpeg","png":"fast"}','done',1,1794956451170,1794956451197,1794956452627,NULL,NULL,NULL,0);
INSERT INTO jobs VALUES(2,'07162e5e9a05255df5885bc0','127.0.0.1',0,'{"prompt":"cancelled","width":512,"height":512,"seed":3550647016,"steps":50,"output_format":"png","png":"fast"}','cancelled',1,1794956454280,1794956454280,1794956454857,'cancelled','cancelled',NULL,-1);
INSERT INTO jobs VALUES(3,'eeed18888b1bf66f89bb5881','127.0.0.1',0,'{"prompt":"long","width":512,"height":512,"seed":2920861496,"steps":50,"output_format":"png","png":"fast"}','running',1,1794956454885,1794956454885,NULL,NULL,NULL,NULL,0);
INSERT INTO jobs VALUES(4,'6c5502d83d3d2f289ff085ed','127.0.0.1',0,'{"prompt":["a fox","a hen"],"width":64,"height":64,"seed":[3,4],"steps":2,"output_format":"png","png":"fast"}','running',1,1794956454933,1794956454952,NULL,NULL,NULL,NULL,1);
CREATE TABLE job_inputs (
    job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    input TEXT NOT NULL
);
CREATE TABLE pictures (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    job TEXT NOT NULL,
    number INTEGER NOT NULL,
    created INTEGER NOT NULL,
    width INTEGER NOT NULL,
    height INTEGER NOT NULL,
    seed TEXT,
    file TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    prompt TEXT NOT NULL,
    model TEXT NOT NULL,
    request TEXT NOT NULL,
    recipe TEXT NOT NULL
);
INSERT INTO pictures VALUES(1,'39e188df2d1812fc2677ac91-0','39e188df2d1812fc2677ac91',0,1794956452627,64,64,'7','39e188df2d1812fc2677ac91-0.jpg',2485,'an apple','ember','{"prompt":"an apple","width":64,"height":64,"seed":7,"steps":1,"output_format":"jpeg","png":"fast"}','{"kiln":"0.1.0","prompt":"an apple","width":64,"height":64,"seed":7,"max_tokens":64,"steps":1,"schedule":"shifted","rng":"cpu","index":0,"batch":1,"model":{"path":"ember","variant":"klein (distilled)","transformer":"d6fe96e8177df303aefee63fde3412533d00defe192272374157ae14391f9fc1","text_encoder":"3b3e57509805e4c7655478ae9910193c6966975a4bbceea24ba86277c2ca0393","vae":"cbdcfb3259defcccea6e10e09795cb092d012aaf19dccd1b8e672006578b7638"},"dtype":"bf16","backend":"cpu (amx, 2 threads)"}');
CREATE TABLE idempotency (
    client TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
    created INTEGER NOT NULL,
    PRIMARY KEY (client, key)
);
INSERT INTO idempotency VALUES('127.0.0.1','once','621351d99e503bc58fbbafcd2a2d8bc6c229251ced942a624c984ecc3f4364ae','39e188df2d1812fc2677ac91',1794956451192);
CREATE TABLE webhooks (
    job TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    url TEXT NOT NULL
);
CREATE TABLE marks (
    picture TEXT PRIMARY KEY,
    favourite INTEGER NOT NULL DEFAULT 0,
    trashed INTEGER
);
INSERT INTO marks VALUES('39e188df2d1812fc2677ac91-0',1,NULL);
CREATE TABLE job_ranks (
    job TEXT PRIMARY KEY REFERENCES jobs (id) ON DELETE CASCADE,
    rank INTEGER NOT NULL
);
CREATE TABLE plots (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    client TEXT NOT NULL,
    created INTEGER NOT NULL,
    axes TEXT NOT NULL,
    jobs TEXT NOT NULL
);
CREATE TABLE inputs (
    hash TEXT NOT NULL,
    client TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    used INTEGER NOT NULL,
    PRIMARY KEY (hash, client)
) WITHOUT ROWID;
CREATE TABLE sessions (
    hash BLOB PRIMARY KEY,
    key TEXT NOT NULL,
    proof BLOB NOT NULL,
    expires INTEGER NOT NULL
) WITHOUT ROWID;
DELETE FROM sqlite_sequence;
INSERT INTO sqlite_sequence VALUES('jobs',4);
INSERT INTO sqlite_sequence VALUES('pictures',1);
CREATE INDEX jobs_state ON jobs (state);
CREATE INDEX job_inputs_job ON job_inputs (job);
CREATE INDEX job_inputs_input ON job_inputs (input);
CREATE INDEX pictures_job ON pictures (job);
CREATE INDEX idempotency_job ON idempotency (job);
CREATE INDEX inputs_client ON inputs (client, used);
CREATE INDEX jobs_client ON jobs (client);
COMMIT;
PRAGMA user_version = 7;
