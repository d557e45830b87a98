CREATE TABLE task_lock_alembic_version (
    version_num VARCHAR(32) NOT NULL, 
    CONSTRAINT task_lock_alembic_version_pkc PRIMARY KEY (version_num)
);

-- Running upgrade  -> 0001

CREATE TABLE task_lock (
    task_name TEXT NOT NULL, 
    started_at TIMESTAMP WITH TIME ZONE NOT NULL, 
    locked_until TIMESTAMP WITH TIME ZONE NOT NULL, 
    window_start TIMESTAMP WITH TIME ZONE NOT NULL, 
    window_until TIMESTAMP WITH TIME ZONE NOT NULL, 
    locked_by TEXT NOT NULL, 
    claim_id UUID NOT NULL, 
    token BIGINT NOT NULL, 
    finished_at TIMESTAMP WITH TIME ZONE, 
    run_until TIMESTAMP WITH TIME ZONE NOT NULL, 
    failover BOOLEAN NOT NULL, 
    deaths INTEGER NOT NULL, 
    handovers INTEGER NOT NULL, 
    handed_over BOOLEAN NOT NULL, 
    runs TEXT NOT NULL, 
    one_off BOOLEAN NOT NULL, 
    kind TEXT, 
    schedule TEXT, 
    due_at TIMESTAMP WITH TIME ZONE, 
    overdue_at TIMESTAMP WITH TIME ZONE, 
    overrun_at TIMESTAMP WITH TIME ZONE, 
    recorded BIGINT DEFAULT 0 NOT NULL, 
    recorded_failures BIGINT DEFAULT 0 NOT NULL, 
    recorded_actions BIGINT DEFAULT 0 NOT NULL, 
    recorded_misses BIGINT DEFAULT 0 NOT NULL, 
    missed_at TIMESTAMP WITH TIME ZONE, 
    succeeded_at TIMESTAMP WITH TIME ZONE, 
    failed_at TIMESTAMP WITH TIME ZONE, 
    failures INTEGER DEFAULT 0 NOT NULL, 
    error_type TEXT, 
    paused_at TIMESTAMP WITH TIME ZONE, 
    paused_until TIMESTAMP WITH TIME ZONE, 
    pauses JSONB, 
    request_id UUID, 
    requested_by TEXT, 
    requested_at TIMESTAMP WITH TIME ZONE, 
    request_until TIMESTAMP WITH TIME ZONE, 
    acknowledged_at TIMESTAMP WITH TIME ZONE, 
    last_outcome TEXT, 
    overran BOOLEAN DEFAULT false NOT NULL, 
    is_last BOOLEAN DEFAULT false NOT NULL, 
    window_schedule TEXT, 
    schedule_since TIMESTAMP WITH TIME ZONE, 
    details TEXT, 
    attempt INTEGER DEFAULT 1 NOT NULL, 
    retry_at TIMESTAMP WITH TIME ZONE, 
    retry_of UUID, 
    PRIMARY KEY (task_name), 
    CONSTRAINT task_lock_texts CHECK (GREATEST(pg_catalog.length(task_name), pg_catalog.length(locked_by), pg_catalog.length(runs), pg_catalog.length(kind), pg_catalog.length(schedule), pg_catalog.length(error_type), pg_catalog.length(requested_by), pg_catalog.length(last_outcome), pg_catalog.length(window_schedule)) <= 10000), 
    CONSTRAINT task_lock_times CHECK (LEAST(started_at, locked_until, window_start, window_until, finished_at, run_until, due_at, overdue_at, overrun_at, missed_at, succeeded_at, failed_at, paused_at, paused_until, requested_at, request_until, acknowledged_at, schedule_since, retry_at) >= timestamptz '0001-01-02Z' AND GREATEST(started_at, locked_until, window_start, window_until, finished_at, run_until, due_at, overdue_at, overrun_at, missed_at, succeeded_at, failed_at, paused_at, paused_until, requested_at, request_until, acknowledged_at, schedule_since, retry_at) <= timestamptz '9999-12-30Z'), 
    CONSTRAINT task_lock_pauses CHECK (pg_catalog.octet_length(CAST(pauses AS text)) <= 1000000), 
    CONSTRAINT task_lock_details CHECK (pg_catalog.octet_length(CAST(details AS text)) <= 1000000)
);

ALTER TABLE task_lock SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

CREATE TABLE task_lock_run (
    task_name TEXT NOT NULL, 
    ring TEXT NOT NULL, 
    slot INTEGER NOT NULL, 
    token BIGINT, 
    scheduled_at TIMESTAMP WITH TIME ZONE, 
    started_at TIMESTAMP WITH TIME ZONE NOT NULL, 
    ended_at TIMESTAMP WITH TIME ZONE NOT NULL, 
    replica TEXT NOT NULL, 
    kind TEXT NOT NULL, 
    outcome TEXT NOT NULL, 
    error_type TEXT, 
    error TEXT, 
    traceback TEXT, 
    by TEXT, 
    until TIMESTAMP WITH TIME ZONE, 
    reason TEXT, 
    cause TEXT, 
    last_scheduled_at TIMESTAMP WITH TIME ZONE, 
    run_times INTEGER, 
    attempt INTEGER, 
    retry_at TIMESTAMP WITH TIME ZONE, 
    action_id UUID, 
    release TEXT, 
    PRIMARY KEY (task_name, ring, slot), 
    CONSTRAINT task_lock_run_texts CHECK (GREATEST(pg_catalog.length(task_name), pg_catalog.length(ring), pg_catalog.length(replica), pg_catalog.length(kind), pg_catalog.length(outcome), pg_catalog.length(error_type), pg_catalog.length(by), pg_catalog.length(reason), pg_catalog.length(cause), pg_catalog.length(release)) <= 10000 AND GREATEST(pg_catalog.length(error)) <= 2000 AND GREATEST(pg_catalog.length(traceback)) <= 8000), 
    CONSTRAINT task_lock_run_times CHECK (LEAST(scheduled_at, started_at, ended_at, until, last_scheduled_at, retry_at) >= timestamptz '0001-01-02Z' AND GREATEST(scheduled_at, started_at, ended_at, until, last_scheduled_at, retry_at) <= timestamptz '9999-12-30Z')
);

ALTER TABLE task_lock_run SET (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

CREATE TABLE task_lock_replica (
    replica_id TEXT NOT NULL, 
    host TEXT NOT NULL, 
    version TEXT NOT NULL, 
    started_at TIMESTAMP WITH TIME ZONE NOT NULL, 
    seen_at TIMESTAMP WITH TIME ZONE NOT NULL, 
    tasks TEXT[] NOT NULL, 
    stopped_at TIMESTAMP WITH TIME ZONE, 
    rejected TEXT[] DEFAULT '{}' NOT NULL, 
    running JSONB DEFAULT '[]' NOT NULL, 
    leader_namespace TEXT, 
    release TEXT, 
    keep_one_offs BIGINT, 
    PRIMARY KEY (replica_id), 
    CONSTRAINT task_lock_replica_texts CHECK (GREATEST(pg_catalog.length(replica_id), pg_catalog.length(host), pg_catalog.length(version), pg_catalog.length(leader_namespace), pg_catalog.length(release)) <= 10000), 
    CONSTRAINT task_lock_replica_times CHECK (LEAST(started_at, seen_at, stopped_at) >= timestamptz '0001-01-02Z' AND GREATEST(started_at, seen_at, stopped_at) <= timestamptz '9999-12-30Z'), 
    CONSTRAINT task_lock_replica_lists CHECK (pg_catalog.octet_length(CAST(tasks AS text)) + pg_catalog.octet_length(CAST(rejected AS text)) + pg_catalog.octet_length(CAST(running AS text)) <= 10000000)
);

CREATE TABLE task_lock_job (
    id TEXT NOT NULL, 
    func TEXT NOT NULL, 
    trigger JSONB NOT NULL, 
    options JSONB NOT NULL, 
    arguments JSONB NOT NULL, 
    executor TEXT NOT NULL, 
    definition_id UUID, 
    signature TEXT, 
    version BIGINT NOT NULL, 
    added_id UUID NOT NULL, 
    changed_id UUID, 
    changed_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL, 
    next_run_time TIMESTAMP WITH TIME ZONE, 
    last_run_time TIMESTAMP WITH TIME ZONE, 
    ended BOOLEAN NOT NULL, 
    task_name TEXT, 
    PRIMARY KEY (id), 
    CONSTRAINT task_lock_job_texts CHECK (GREATEST(pg_catalog.octet_length(id), pg_catalog.octet_length(func), pg_catalog.octet_length(executor), pg_catalog.octet_length(signature), pg_catalog.octet_length(task_name)) <= 1000000), 
    CONSTRAINT task_lock_job_times CHECK (LEAST(changed_at, next_run_time, last_run_time) >= timestamptz '0001-01-02Z' AND GREATEST(changed_at, next_run_time, last_run_time) <= timestamptz '9999-12-30Z'), 
    CONSTRAINT task_lock_job_definition CHECK (pg_catalog.octet_length(CAST(trigger AS text)) + pg_catalog.octet_length(CAST(options AS text)) + pg_catalog.octet_length(CAST(arguments AS text)) <= 500000)
);

ALTER TABLE task_lock_job SET (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000);

CREATE INDEX task_lock_job_due ON task_lock_job (executor, next_run_time, id) WHERE next_run_time IS NOT NULL;

CREATE INDEX task_lock_job_ended ON task_lock_job (id) WHERE ended;

DO $tasklock$
BEGIN
    EXECUTE 'COMMENT ON TABLE ' || 'task_lock_job' || ' IS ' || pg_catalog.quote_literal(
        'apscheduler-tasklock ' || gen_random_uuid()
        || '. Do not change this comment: the signatures of stored jobs are made with it.');
END
$tasklock$;

DO $tasklock$
DECLARE
    entry record;
BEGIN
    FOR entry IN
        SELECT privilege_type, CASE WHEN grantee = 0 THEN 'PUBLIC'
                                    ELSE quote_ident(pg_get_userbyid(grantee)) END AS grantee
        FROM pg_class, aclexplode(COALESCE(relacl, acldefault('r', relowner)))
        WHERE pg_class.oid = 'task_lock'::regclass
             AND grantee <> (SELECT oid FROM pg_roles WHERE rolname = current_user)
             AND privilege_type IN ('SELECT', 'INSERT', 'UPDATE', 'DELETE')
    LOOP
        EXECUTE 'GRANT ' || entry.privilege_type || ' ON ' || 'task_lock_job'
                || ' TO ' || entry.grantee;
        IF entry.privilege_type = 'UPDATE' THEN
            EXECUTE 'GRANT DELETE ON ' || 'task_lock_job' || ' TO ' || entry.grantee;
        END IF;
    END LOOP;
END
$tasklock$;

INSERT INTO task_lock_alembic_version (version_num) VALUES ('0001') RETURNING task_lock_alembic_version.version_num;
